"""Requests of a worker whose bytes are odd: a 4xx in JSON or an answer, never a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rig import CHAT, RawClient, Reply

BODY = json.dumps(
    {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
).encode()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A worker that wants a key."""
    from conftest import WorkerLauncher

    launcher = WorkerLauncher(tmp_path_factory.mktemp("keyed"))
    yield launcher(env={"HEADWATER_SERVE__API_KEYS": '["k\u00e9y"]'})
    launcher.end()


async def send(url: str, headers: bytes, body: bytes = BODY) -> Reply:
    """One request with these header lines besides the usual ones."""
    client = await RawClient.connect(url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\n".encode()
    client.writer.write(head + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    reply = await client.read()
    client.close()
    return reply


@pytest.mark.parametrize("size", [10_000, 30_000])
async def test_headers_that_the_gateway_lets_through(fake_worker: Any, size: int) -> None:
    assert (await send(fake_worker.url, b"X-Long: " + b"a" * size + b"\r\n")).status == 200


@pytest.mark.parametrize(
    ("token", "status"),
    [
        (b"k\xc3\xa9y", 200),
        (b"k\xe9y", 401),
        (b"\xff\xfe", 401),
        (b"\xed\xa0\x80", 401),
        (b"", 401),
    ],
)
async def test_keys_of_any_bytes(keyed: Any, token: bytes, status: int) -> None:
    reply = await send(keyed.url, b"Authorization: Bearer " + token + b"\r\n")
    assert reply.status == status
    if status == 401:
        assert reply.json["error"]["message"]
