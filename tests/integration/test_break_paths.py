"""Paths that a worker may read as another one than the gateway does are not passed on."""

from __future__ import annotations

import json

import pytest
from rig import CHAT, ask, chat

from gateway.app import OTHER, OTHER_V1, route_of

DISGUISED = [
    "/v1/../admin/cache/flush",
    "/v1/%2e%2e/admin/cache/flush",
    "/v1/%2E./x",
    "/v1/a/../../metrics",
    "/v1/./chat/completions",
    "/v1//chat/completions",
    "/v1/%2Fadmin",
    "/v1/x/..%2f..%2fadmin",
    "/v1/..\\admin",
    "/v1/%5c..%5cadmin",
    "/v1/%63hat/completions",
    "/v1/chat%2Fcompletions",
    "/v1/chat/completions/",
    "/v1/chat/completions;x=1",
    "/v1/embeddings%3Bx",
    "/v1/%65mbeddings",
    "/v1/a%0d%0aX:1",
    "/v1/a%00",
    "/v1/a%09b",
    "/v1/..",
    "/v1/.",
    "/v1/%6dodels",
]
PLAIN = [
    "/v1/audio/speech",
    "/v1/images/generations?x=..",
    "/v1/jobs/a%3Ab/cancel",
    "/v1/caf%C3%A9",
    "/v1/a...b",
    "/v1/x/",
    "/v1/chat/completions2",
]


@pytest.mark.parametrize("path", DISGUISED)
async def test_disguised_paths_reach_no_worker(stub, serve, path) -> None:
    worker = await stub()
    served = await serve(worker)
    reply = await ask(served.url, path, json.dumps(chat()).encode())
    assert reply.status == 404
    assert reply.json["error"]["message"]
    assert worker.seen == []
    assert route_of(path) == OTHER


@pytest.mark.parametrize("path", PLAIN)
async def test_other_paths_pass_as_they_are(stub, serve, path) -> None:
    worker = await stub()
    served = await serve(worker)
    assert (await ask(served.url, path, chat())).status == 200
    assert worker.seen[0].target == path
    assert route_of(path.split("?")[0]) == OTHER_V1


async def test_a_query_on_a_generation_route_changes_nothing(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    assert (await ask(served.url, f"{CHAT}?key=CANARY", chat())).status == 200
    assert "CANARY" not in worker.seen[0].target
