"""``headwater explain`` against an admin listener that is a function."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ledgerkit import headwater

from gateway.asked import ROUTES
from gateway.cli import explain as command

CHATS = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "seed": 2**70}
ANSWER = {
    "request": {"model": "m", "prompt_tokens": 1000, "blocks": 62, "route": "chat"},
    "policy": "cost",
    "choice": "127.0.0.1:18472",
    "reason": "lowest expected time",
    "reject": None,
    "predicted_ttft_s": 0.0125,
    "workers": [
        {
            "id": "127.0.0.1:18472",
            "state": "ready",
            "trust": "exact",
            "matched_tokens": 960,
            "cost_s": 0.0125,
            "parts": {"wait": 0.0, "own": 0.0125, "memory": 0.0, "decode": 0.0},
            "inflight": 3,
        },
        {
            "id": "w1",
            "state": "ready",
            "trust": "learned",
            "matched_tokens": 320,
            "host_tokens": 160,
            "cost_s": 1.5,
            "parts": {"wait": 1.0, "own": 0.4, "memory": 0.0, "decode": 0.1},
            "inflight": 0,
            "added_later": True,
        },
    ],
}

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Handler], list[httpx.Request]]]:
    """Puts a handler in the gateway's place; returns the list of what it is sent."""
    real = command.make_client

    def install(handler: Handler) -> list[httpx.Request]:
        seen: list[httpx.Request] = []

        def keep(request: httpx.Request) -> httpx.Response:
            seen.append(request)
            return handler(request)

        def make(url: str, token: str) -> httpx.Client:
            with real(url, token) as client:
                return httpx.Client(
                    base_url=client.base_url,
                    headers=client.headers,
                    transport=httpx.MockTransport(keep),
                )

        monkeypatch.setattr(command, "make_client", make)
        return seen

    return install


def answers(status: int = 200, body: Any = ANSWER) -> Handler:
    """A gateway that always says the same."""
    return lambda _request: httpx.Response(status, json=body)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A request file, spaced as people do."""
    file = tmp_path / "request.json"
    file.write_text(json.dumps(CHAT, indent=3))
    return file


def test_the_table_shows_who_holds_what_and_what_it_costs(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = gateway(answers())
    assert headwater("explain", chat, "--url", "http://gw:1234", "--token", "secret") == 0
    (request,) = seen
    assert str(request.url) == "http://gw:1234/admin/explain"
    assert request.content == chat.read_bytes()
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["content-type"] == "application/json"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "m: 1000 prompt tokens, 62 blocks"
    assert lines[1] == "Would go to 127.0.0.1:18472 (policy cost)"
    assert lines[2] == "First token expected after 12.5 ms"
    assert lines[3] == "Why: lowest expected time"
    assert lines[5].split() == ("worker state trust matched running cost wait own decode".split())
    assert (
        lines[6].split()
        == "-> 127.0.0.1:18472 ready exact 960 (96 %) 3 12.5 ms 0 ms 12.5 ms 0 ms".split()
    )
    assert (
        lines[7].split()
        == "w1 ready learned 320 (32 %), 160 host 0 1.5 s 1 s 400 ms 100 ms".split()
    )
    assert lines[8].strip() == "nothing for: memory"
    assert max(map(len, lines)) <= 100


def test_long_names_of_workers_can_still_be_told_apart(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = dict.fromkeys(("wait", "own", "others", "memory", "decode"), 0.000275)
    workers = [
        ANSWER["workers"][0] | {"id": f"worker.namespace.svc.cluster.local:810{i}", "parts": parts}
        for i in range(2)
    ]
    gateway(answers(body=ANSWER | {"workers": workers, "choice": None}))
    assert headwater("explain", chat) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    shown = [line.split()[0] for line in lines[-2:]]
    assert shown[0].endswith("100"), lines
    assert shown[1].endswith("101"), lines
    assert shown[0].startswith("work")


def test_costs_of_other_policies_are_no_seconds(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway(answers(body=ANSWER | {"policy": "least_loaded"}))
    assert headwater("explain", chat) == 0
    assert capsys.readouterr().out.splitlines()[7].split()[-4:] == ["1.5", "1", "0.4", "0.1"]


def test_a_rejection_is_an_explanation(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reject = {"message": "no worker has room", "code": "no_capacity"}
    gateway(answers(body=ANSWER | {"choice": None, "reject": reject, "workers": []}))
    assert headwater("explain", chat) == 0
    assert "Would be rejected: no worker has room" in capsys.readouterr().out


def test_the_commands_name_the_routes_that_the_gateway_knows() -> None:
    assert {f"/v1/{name}" for name in command.ROUTES} - {"/v1/chat"} == set(ROUTES) - {CHATS}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "embeddings", "chats"])
def test_another_route_is_wrong_usage(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
    route: str,
) -> None:
    seen = gateway(answers())
    assert headwater("explain", chat, "--route", route) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not seen


def test_a_missing_tokenizer_is_told(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = {"model": "m", "prompt_tokens": 0, "tokenizer_missing": "it is being loaded"}
    gateway(answers(body=ANSWER | {"request": request}))
    assert headwater("explain", chat) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["m: size not known", "Tokens are not known exactly: it is being loaded"]


def test_json_passes_the_whole_answer_on(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway(answers())
    assert headwater("explain", chat, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


def test_completions_come_from_standard_input(
    gateway: Callable[[Handler], list[httpx.Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = gateway(answers())
    body = b'{"prompt": [1, 2, 3], "model": "m"}'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body)))
    assert headwater("explain", "-") == 0
    assert seen[0].content == body
    assert "authorization" not in seen[0].headers


def refuse(request: httpx.Request) -> httpx.Response:
    """Nobody there."""
    raise httpx.ConnectError("Connection refused", request=request)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (refuse, "no gateway answers at http://127.0.0.1:8001"),
        (answers(401, {"error": {"message": "no\nsuch token"}}), "401: no such token (--token"),
        (answers(404, {"error": {"message": "no model x"}}), "answered 404: no model x"),
        (answers(404, "?"), "answered 404: Not Found; is this the admin address?"),
        (answers(200, {"hello": "world"}), "no answer of a gateway's admin listener"),
        (lambda _request: httpx.Response(200, text="<html>"), "no answer of a gateway's"),
    ],
)
def test_no_explanation_is_one_line_and_exit_code_1(
    gateway: Callable[[Handler], list[httpx.Request]],
    chat: Path,
    capsys: pytest.CaptureFixture[str],
    handler: Handler,
    said: str,
) -> None:
    gateway(handler)
    assert headwater("explain", chat) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headwater explain: ")
    assert said in line


@pytest.mark.parametrize(
    ("body", "arguments", "said"),
    [
        (None, [], "cannot be read: No such file or directory"),
        ("{", [], "is no JSON"),
        ("[]", [], "is no request"),
        ('{"model": "m"}', [], "is no request"),
        ('{"prompt": "x"}', ["--url", "gateway:8001"], "--url: 'gateway:8001'"),
        ('{"prompt": "x"}', ["--format", "html"], "--format: 'html': is none of text, json"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: str | None,
    arguments: list[str],
    said: str,
) -> None:
    file = tmp_path / "request.json"
    if body is not None:
        file.write_text(body)
    assert headwater("explain", file, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
