"""A09: missing and foreign content types, and encoded bodies.

The choice is in ``docs/behaviour.md``: the gateway takes only what is declared as JSON, the worker
also what is not declared at all; neither takes an encoded body.
"""

from __future__ import annotations

import gzip
import zlib

import pytest
from caserig import COMPLETIONS, check_error

BODY = b'{"model":"fake","prompt":"x","max_tokens":1}'
JSON = ("Content-Type", "application/json")
PLACES = ["worker", "gateway"]


@pytest.fixture(params=PLACES)
async def place(request, fake_worker, serve, stub, dial):
    """(which one, a connection to it)."""
    served = await serve(await stub(models=("fake",)))
    url = fake_worker.url if request.param == "worker" else served.url
    yield request.param, await dial(url)
    if request.param == "gateway":
        assert all(seen.body == BODY for seen in served.stubs[0].seen)


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        "application/json ;x=y",
        "application/vnd.api+json",
    ],
)
async def test_json(place, kind) -> None:
    reply = await place[1].ask("POST", COMPLETIONS, BODY, ("Content-Type", kind))
    assert reply.status == 200


@pytest.mark.parametrize(
    "kind",
    [
        "application/x-www-form-urlencoded",
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "text/html",
        "application/jsonl",
        "xjson",
        "/",
        "json",
    ],
)
async def test_foreign_ones(place, kind) -> None:
    for _ in range(2):
        reply = await place[1].ask("POST", COMPLETIONS, BODY, ("Content-Type", kind))
        assert "content type" in check_error(reply, 415)["message"]
    assert (await place[1].ask("POST", COMPLETIONS, BODY)).status == 200


async def test_none(place) -> None:
    where, client = place
    lines = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
    client.writer.write(lines.encode() + BODY)
    reply = await client.read()
    if where == "worker":
        assert reply.status == 200
    else:
        assert "content type" in check_error(reply, 415)["message"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("gzip", gzip.compress(BODY)),
        ("gzip", gzip.compress(BODY)[:-9]),
        ("gzip", BODY),
        ("gzip", gzip.compress(b" " * 100_000_000, 1)),
        ("x-gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("br", BODY),
        ("zstd", BODY),
        ("compress", BODY),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY))),
        ("identity, gzip", gzip.compress(BODY)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_encoded_bodies(place, name, body) -> None:
    client = place[1]
    for _ in range(2):
        reply = await client.ask("POST", COMPLETIONS, body, JSON, ("Content-Encoding", name))
        assert "encoding" in check_error(reply, 415)["message"]
    plain = await client.ask("POST", COMPLETIONS, BODY, JSON, ("Content-Encoding", "identity"))
    assert plain.status == 200
