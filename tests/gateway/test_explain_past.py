"""``headwater explain --request ID``: from the gateway's memory, else from the ledger."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from ledgerkit import START, headwater, hit, record, write_ledger

from gateway.cli import explain as command
from gateway.records import Outcome, TokenFlow, Why

WHY = Why(code="cheaper", term="wait", other="w2", other_matched=96, gap=0.25)
ANSWER = record(
    request_id="req-7",
    client_id="mine",
    attempt=2,
    flow=hit(100, 64, 4),
    prompt_tokens=100,
    matched_tokens=64,
    ttft_s=0.1,
    predicted_ttft_s=0.12,
    why=WHY,
)
FIRST = record(
    request_id="req-7", client_id="mine", final=False, worker="w3", outcome=Outcome.UPSTREAM_ERROR,
    status=502, prompt_tokens=100, matched_tokens=0, why=Why(code="no_overlap"),
)  # fmt: skip


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gateway has the request."""
    real = command.make_client

    def make(url: str, token: str) -> httpx.Client:
        client = real(url, token)
        answer = httpx.MockTransport(lambda request: httpx.Response(404, json={"error": {}}))
        return httpx.Client(base_url=client.base_url, transport=answer)

    monkeypatch.setattr(command, "make_client", make)


@pytest.mark.parametrize("name", ["req-7", "mine"])
@pytest.mark.parametrize("form", ["l.jsonl", "l.jsonl.gz", "l.parquet"])
def test_the_ledger_tells_why_by_either_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nobody: None, name: str, form: str
) -> None:
    others = [record(request_id=f"r{number}", at=START + number) for number in range(50)]
    file = tmp_path / form
    lines = [*others, FIRST, ANSWER]
    if file.suffix == ".parquet":
        plain = write_ledger(tmp_path / "plain.jsonl", lines)
        assert headwater("report", plain, "--format", "parquet", "-o", file) == 0
    else:
        write_ledger(file, lines, rest=b'{"at": 1')
    assert headwater("explain", "--request", name, "--ledger", file) == 0
    text = capsys.readouterr().out
    assert "req-7 (mine), 2026-07-28 10:00:00 UTC, m, attempt 2" in text
    assert "Went to w3 (policy cost): upstream_error, status 502" in text
    assert (
        "Why: w1 held 64 of 100 tokens: another held more, but was not worth it; w2 (96 tokens)"
        in (" ".join(text.split()))
    )
    assert "most of it work waiting there" in " ".join(text.split())
    assert "Tokens: 100 prompt, 4 tail, 32 cold, 64 available, 64 captured, 64 delivered" in text
    assert text.index("w3") < text.index("w1")


def test_json_has_the_same_shape_as_the_admin_route(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nobody: None
) -> None:
    file = write_ledger(tmp_path / "l.jsonl", [ANSWER])
    assert headwater("explain", "--request", "req-7", "--ledger", file, "--format", "json") == 0
    (attempt,) = json.loads(capsys.readouterr().out)["attempts"]
    assert attempt["choice"] == "w1"
    assert attempt["request"]["flow"]["delivered"] == 64
    assert attempt["request"]["why"]["other"] == "w2"


def test_a_rejection_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nobody: None
) -> None:
    rejected = record(
        request_id="req-9", attempt=0, worker="", outcome=Outcome.REJECTED, status=503,
        flow=TokenFlow(), why=Why(code="rejected"),
    )  # fmt: skip
    file = write_ledger(tmp_path / "l.jsonl", [rejected])
    assert headwater("explain", "--request", "req-9", "--ledger", file) == 0
    text = capsys.readouterr().out
    assert "Went nowhere: rejected, status 503" in text
    assert "no worker was tried" in text


def test_what_nobody_has_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nobody: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = write_ledger(tmp_path / "l.jsonl", [ANSWER])
    assert headwater("explain", "--request", "nope", "--ledger", file) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "not among the gateway's last ones" in told
    monkeypatch.setenv("HEADWATER_LEDGER__DIR", str(tmp_path / "none"))
    assert headwater("explain", "--request", "nope") == 1
    assert "no ledger to ask" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["body.json", "--request", "x"]])
def test_a_body_or_an_id_but_not_both(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert headwater("explain", *arguments) == 2
    assert "either a request's body or --request ID" in capsys.readouterr().err


async def test_the_gateway_tells_all_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    from dashboardkit import Scene

    scene = Scene(3, 10)
    name = scene.request()
    async with scene.serve() as url:
        code = await asyncio.to_thread(headwater, "explain", "--request", name, "--url", url)
    assert code == 0
    text = capsys.readouterr().out
    assert all(worker in text for worker in ("w1", "w2", "w3"))
    assert "->" in text
    assert "Why: " in text
