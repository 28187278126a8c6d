"""What a worker refuses, and how: status, shape, and a usable connection afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.workerrig import CHAT, COMPLETIONS, Client, chat, completion, error_of


@pytest.fixture
async def client(fake_worker: Any) -> AsyncIterator[Client]:
    async with Client(fake_worker.url) as made:
        yield made


MALFORMED = [
    b'{"model":"fake",x}',
    b"[]",
    b'"str"',
    b"",
    b'{"model":"fake"}',
    b'{"model":"fake","messages":"hi"}',
    b'{"model":"fake","messages":[]}',
    b'{"model":"fake","messages":[{"role":"user"}],"temperature":"hot"}',
    b'{"model":"fake","messages":[{"role":"user","content":"x"}],"n":0,"stream":true}',
    b"[" * 10_000,
    bytes.fromhex("fffe7b"),
]


@pytest.mark.parametrize("body", MALFORMED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_malformed_bodies(client: Client, path: str, body: bytes) -> None:
    answer = await client.http.post(
        path, content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (400, 422)
    error_of(answer)
    assert (await client.post(CHAT, chat("still usable", max_tokens=1))).status_code == 200


@pytest.mark.parametrize(
    ("declared", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
    ],
)
async def test_content_types(client: Client, declared: str | None, status: int) -> None:
    headers = {} if declared is None else {"Content-Type": declared}
    body = b'{"prompt":"x","max_tokens":1}'
    answer = await client.http.post(COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert "content type" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "request_body",
    [
        (CHAT, chat("x", max_tokens=0)),
        (CHAT, chat("x", seed=2**63)),
        (CHAT, chat("x", response_format={"type": "json_schema"})),
        (CHAT, chat("x", tools=[], tool_choice="required")),
        (COMPLETIONS, completion("x", best_of=4)),
        (COMPLETIONS, completion([1, 259])),
        (COMPLETIONS, completion([])),
        (COMPLETIONS, completion("")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_are_400_before_any_byte(
    client: Client, request_body: tuple[str, dict[str, Any]], stream: bool
) -> None:
    path, body = request_body
    answer = await client.post(path, {**body, "stream": stream})
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


async def test_images_are_refused(client: Client) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {**chat(""), "messages": [{"role": "user", "content": [part]}]}
    answer = await client.post(CHAT, body)
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompts(client: Client, stream: bool) -> None:
    capacity = 512 * 16
    cases = [
        (CHAT, chat("x" * capacity)),
        (COMPLETIONS, completion("x" * capacity)),
        (COMPLETIONS, completion(["ok", "x" * capacity])),
        (COMPLETIONS, completion("x" * 8000, max_tokens=500)),
    ]
    for path, body in cases:
        answer = await asyncio.wait_for(client.post(path, {**body, "stream": stream}), 30)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "context_length_exceeded"
    assert (await client.load())["running"] == 0
    assert (await client.post(CHAT, chat("fine", max_tokens=1))).status_code == 200


async def test_unknown_models(client: Client) -> None:
    for path in (CHAT, COMPLETIONS):
        make = chat if path == CHAT else completion
        answer = await client.post(path, {**make("x"), "model": "nobody"})
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"
        for missing in (None, ""):
            body = {**make("x", max_tokens=1), "model": missing}
            assert (await client.post(path, body)).status_code == 200
    assert (await client.http.get("/v1/models/nobody")).status_code == 404
    assert (await client.http.get("/v1/models/fake")).json()["id"] == "fake"


async def test_unknown_routes_and_methods(client: Client) -> None:
    answer = await client.http.get("/v1/nothing")
    assert answer.status_code == 404
    error_of(answer)
    answer = await client.http.get(CHAT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    error_of(answer)


async def test_request_ids_are_echoed_only_if_plain(client: Client) -> None:
    async def echoed(sent: str | None) -> str:
        headers = {} if sent is None else {"x-request-id": sent}
        answer = await client.http.post(CHAT, json=chat("id", max_tokens=1), headers=headers)
        stream = chat("id", max_tokens=1, stream=True)
        streamed = await client.http.post(CHAT, json=stream, headers=headers)
        assert answer.json()["id"].startswith("chatcmpl-")
        assert sent is None or sent not in answer.json()["id"]
        one, two = answer.headers["x-request-id"], streamed.headers["x-request-id"]
        assert (one == sent) == (two == sent)
        return str(one)

    assert await echoed("abc-1.2:3_x") == "abc-1.2:3_x"
    for odd in (None, "a b", "x" * 129, 'a"b', "<script>"):
        assert (await echoed(odd)).startswith("req-")


async def test_same_id_from_many_clients(client: Client) -> None:
    prompts = [f"prompt number {number} with its own words" for number in range(20)]
    alone = [await client.ask(CHAT, chat(text, max_tokens=30)) for text in prompts]

    async def ask(text: str) -> Any:
        body = {**chat(text, max_tokens=30), "request_id": "same"}
        answer = await client.post(CHAT, body, x_request_id="same")
        assert answer.headers["x-request-id"] == "same"
        return answer.json()

    tasks = [asyncio.create_task(ask(text)) for text in prompts]
    await asyncio.sleep(0.01)
    for task in tasks[::4]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    answers = [result for result in results if not isinstance(result, BaseException)]
    assert len(answers) >= 15
    for result, expected in zip(results, alone, strict=True):
        if not isinstance(result, BaseException):
            assert result["choices"] == expected["choices"]
    assert len({answer["id"] for answer in answers}) == len(answers)


async def test_tokenize_and_detokenize(client: Client) -> None:
    text = "héllo 🌍"
    tokens = await client.ask("/tokenize", {"model": "fake", "prompt": text})
    assert tokens["tokens"] == list(text.encode())
    assert tokens["count"] == len(text.encode())
    assert tokens["max_model_len"] == 512 * 16
    assert tokens["token_strs"] is None
    strings = await client.ask("/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert strings["token_strs"] == ["a", "b"]
    back = await client.ask("/detokenize", {"tokens": tokens["tokens"]})
    assert back == {"prompt": text}
    messages = {"messages": chat("hello")["messages"]}
    rendered = await client.ask("/tokenize", messages)
    answered = await client.ask(CHAT, chat("hello", max_tokens=1))
    assert rendered["count"] == answered["usage"]["prompt_tokens"]
    without = await client.ask("/tokenize", {**messages, "add_generation_prompt": False})
    assert without["count"] < rendered["count"]
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [259]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
    ):
        answer = await client.post(path, body)
        assert answer.status_code == 400, (path, body)
        error_of(answer)


async def test_body_limit(worker_process: Any) -> None:
    worker = worker_process(env={"HEADWATER_SERVE__MAX_BODY_MIB": "0.25"})
    async with Client(worker.url) as client:
        long = completion("x" * 300_000, max_tokens=1)
        answer = await client.post(COMPLETIONS, long)
        assert answer.status_code == 413
        error_of(answer)

        async def pieces() -> AsyncIterator[bytes]:
            yield b'{"prompt":"'
            for _ in range(300):
                yield b"x" * 1000
            yield b'"}'

        answer = await client.http.post(
            COMPLETIONS, content=pieces(), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        error_of(answer)
        assert (await client.post(CHAT, chat("ok", max_tokens=1))).status_code == 200


async def test_api_keys(worker_process: Any) -> None:
    worker = worker_process(env={"HEADWATER_SERVE__API_KEYS": '["k1","k2"]'})
    async with Client(worker.url) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.http.get(path)).status_code == 200
        for headers in ({}, {"Authorization": "Bearer k3"}, {"Authorization": "Basic k1"}):
            for path in ("/v1/models", "/headwater/info", "/headwater/load"):
                answer = await client.http.get(path, headers=headers)
                assert answer.status_code == 401
                assert "k1" not in answer.text
                error_of(answer)
        for key in ("k1", "k2"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.http.get("/v1/models", headers=headers)).status_code == 200
        body = chat("x", max_tokens=1)
        assert (await client.post(CHAT, body, authorization="Bearer k2")).status_code == 200
    assert "k1" not in worker.stderr.read_text()


async def test_unknown_fields_are_logged_once(worker_process: Any) -> None:
    worker = worker_process()
    async with Client(worker.url) as client:
        for _ in range(3):
            body = chat("x", max_tokens=1, frobnicate="secret value", store=True, user="u")
            assert (await client.post(CHAT, body)).status_code == 200
    log = worker.stderr.read_text()
    assert log.count("frobnicate") == 1
    assert "secret value" not in log
    assert '"store"' not in log
