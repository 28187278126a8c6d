"""B19: rendering, tokenizing and hashing long prompts stalls nobody.

Scaled: 6 prompts of 500 KB instead of 16. The limits have room for a busy machine: ten times those
of the case (0.1 s for health, 0.15 s between deltas), less than such prompts take together.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from caserig import COMPLETIONS, GatewayLauncher, GatewayProcess, body_for
from conftest import pick_port
from dialoguekit import ROUTES, Counts, request, told, usage_of
from rig import (
    CHAT,
    END,
    SSE_HEAD,
    RawClient,
    Reply,
    Stub,
    ask,
    chunk,
    completion,
    delta,
    eventually,
)
from stopwatch import Stopwatch

from gateway import pipeline
from gateway.config import RenderConfig
from gateway.decision import ModelProfile
from gateway.prompts import Prompts
from shared import laxjson
from shared.bulk import LARGE_BODY
from shared.bytetok import byte_bundle
from shared.errors import HeadwaterError
from shared.openai import RouteKind, parse
from shared.types import WorkerId

HEALTH_S, GAP_S = 1.0, 1.5
PROMPTS, BYTES = 6, 500_000


@pytest.fixture
async def case(stub: Any, tmp_path: Path) -> AsyncIterator[tuple[GatewayProcess, Stub]]:
    """G with a tokenizer, and S1, which streams a delta each 20 ms to whom asks for a stream."""
    (tmp_path / "tokenizer").mkdir()
    bundle = byte_bundle()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(bundle.tokenizer_json)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(bundle.chat_template or "")
    worker = await stub()
    endless = [SSE_HEAD, *[chunk(delta("x")), 0.02] * 3000, END]
    worker.respond = lambda seen: endless if b'"stream":true' in seen.body else completion()
    launch = GatewayLauncher(tmp_path, pick_port)
    env = {
        "HEADWATER_RENDER__TOKENIZERS": json.dumps({"m": str(tmp_path / "tokenizer")}),
        "HEADWATER_WORKERS__HEALTH_TIMEOUT_S": "10",
    }
    gateway = await asyncio.to_thread(launch, worker.url, env=env)
    yield gateway, worker
    await asyncio.to_thread(launch.end)


async def stream(url: str, gaps: list[float]) -> None:
    """Gaps between the deltas of one stream, for ever."""
    client = await RawClient.connect(url)
    try:
        await client.send("POST", CHAT, laxjson.encode(body_for(CHAT, "hi", stream=True)))
        await client.reader.readuntil(b"\r\n\r\n")
        last = time.monotonic()
        async for _ in client.chunks():
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
    finally:
        client.abort()


async def look(url: str, took: list[float]) -> None:
    """How long health takes, every 50 ms, for ever."""
    while True:
        begun = time.monotonic()
        assert (await ask(url, "/health")).status == 200
        took.append(time.monotonic() - begun)
        await asyncio.sleep(0.05)


def asked(path: str, text: str) -> dict[str, Any]:
    """A request of any route with this prompt."""
    return request(path, [("user", text)]) if path in ROUTES else body_for(path, text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, *ROUTES])
async def test_long_prompts_stall_nobody(case: Any, path: str) -> None:
    gateway, _ = case
    gaps: list[float] = []
    health: list[float] = []
    tasks = [
        asyncio.create_task(stream(gateway.url, gaps)),
        asyncio.create_task(look(gateway.url, health)),
    ]
    await eventually(lambda: len(gaps) >= 5)
    rng = random.Random(path)
    texts = [rng.randbytes(BYTES // 2).hex() for _ in range(PROMPTS)]
    bodies = [laxjson.encode(asked(path, text)) for text in texts]
    gaps.clear()
    health.clear()
    replies: list[Reply] = []
    # Text that only has to be hashed is done with before anybody has looked twice.
    while len(health) <= 3 or not replies:
        replies += await asyncio.gather(*(ask(gateway.url, path, body) for body in bodies))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {reply.status for reply in replies} == {200}
    counted = {int(reply.header("x-headwater-prompt-tokens") or 0) for reply in replies}
    if path in ROUTES:
        body = {**json.loads(bodies[0]), "route": path}
        told = await ask(gateway.admin, "/admin/explain", body)
        assert told.json["request"]["blocks"] >= BYTES // 64, "they were hashed"
    else:
        assert min(counted) >= BYTES, "they were tokenized"
    assert sorted(health)[int(0.99 * len(health))] < HEALTH_S
    assert max(gaps) < GAP_S


class Source:
    """Tokenizer bundles that never come, or fail."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.asked = fails, 0

    async def fetch(self, profile: ModelProfile) -> Any:
        self.asked += 1
        if self.fails:
            raise HeadwaterError("no network")
        await asyncio.sleep(3600)


@pytest.mark.parametrize("fails", [True, False])
async def test_a_tokenizer_that_does_not_come_blocks_nothing_and_is_not_asked_for_again(
    fails: bool,
) -> None:
    source = Source(fails)
    prompts = Prompts(RenderConfig(), b"k", source)
    profile = ModelProfile("m", "fingerprint", (WorkerId("w"),), 16, 0)
    request = parse(RouteKind.CHAT, laxjson.encode(body_for(CHAT, "x" * 100_000)))
    begun = Stopwatch()
    for _ in range(200):
        prompt = await prompts.read(request, profile)
        assert not prompt.keys
        await asyncio.sleep(0)
    assert begun.seconds() < 5.0
    assert source.asked == 1
    assert prompts.missing(profile)
    await prompts.close()


@pytest.mark.parametrize(
    ("path", "reader"),
    [
        (CHAT, "openai.parse"),
        (COMPLETIONS, "openai.parse"),
        *((route, "dialogue.read") for route in ROUTES),
    ],
)
async def test_large_bodies_are_read_beside_the_event_loop(
    stub: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, reader: str
) -> None:
    module, name = reader.split(".")
    read, threads = getattr(getattr(pipeline, module), name), []

    def noting(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return read(*args)

    monkeypatch.setattr(f"gateway.pipeline.{module}.{name}", noting)
    worker = await stub()
    served = await serve(worker)
    for size in (10, LARGE_BODY):
        if path in ROUTES:
            worker.plays(told(path, False, "id", usage_of(path, Counts(7, 0))))
        reply = await ask(served.url, path, asked(path, "x" * size))
        assert reply.status == 200, reply.body
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
