"""Event streams that are not what they should be: named, survived, and nothing wrong believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from enginekit import MODEL, Lab, emulated, lab

from gateway.feeds import enginefeed, roads, zmqstream

SYSTEM = "You are the keeper of the river. " * 12
LIMIT = 100_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that are usually half a second apart."""
    monkeypatch.setattr(zmqstream, "POLL_S", 0.05)
    monkeypatch.setattr(enginefeed, "WAIT_S", 0.05)
    monkeypatch.setattr(roads, "TICK_S", 0.05)


async def keeps_affinity(at: Lab, text: str, **more: Any) -> None:
    """A prompt goes where it was before, and no more is promised than comes."""
    first = await at.say(SYSTEM, text, **more)
    for _ in range(2):
        again = await at.say(SYSTEM, text, **more)
        assert again.worker == first.worker
        assert 0 < again.predicted <= (again.cached or 0) + 16


async def test_two_engines_at_one_event_port_are_told_and_neither_is_believed(
    tmp_path: Path,
) -> None:
    """The usual port of two engines on one host: whose events come there nobody can tell."""
    own: list[Any] = []

    async def join(engines: list[Any]) -> None:
        own.append(engines[1].publisher)
        engines[1].publisher = engines[0].publisher

    async with lab(tmp_path, emulated(), emulated(), before=join) as at:
        names = [engine.id for engine in at.engines]
        for which, other in ((0, 1), (1, 0)):

            def named(which: int = which, other: int = other) -> bool:
                reason = at.status(which).trust_reason
                return names[other] in reason and "its own port" in reason

            await at.until(named)
            assert at.status(which).trust == "learned"
        await keeps_affinity(at, "hello there " * 20)
        at.engines[1].publisher = own[0]
        assert at.gateway.feeds.remove_worker(at.status(1).id)
        await at.until(lambda: at.status(0).trust == "exact")


@pytest.mark.parametrize("replay", [True, False])
async def test_a_frame_beyond_all_limits_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    """ZMQ cuts the connection at it, and a replay that has kept it cuts its own."""
    monkeypatch.setattr(zmqstream, "FRAME_LIMIT", LIMIT)
    monkeypatch.setattr(zmqstream, "REPLAY_STEP_S", 0.5)
    async with lab(tmp_path, emulated(replay=replay)) as at:
        await at.until(at.exact)
        await keeps_affinity(at, "before " * 20)
        publisher = at.engines[0].publisher
        assert publisher is not None
        await publisher.publish(msgspec.msgpack.encode([0.0, [], 0, "x" * 3 * LIMIT]))
        await at.until(lambda: at.status().trust != "exact")
        assert at.status().trust_reason
        for number in range(3):
            await keeps_affinity(at, f"after {number} " * 20)
        await at.until(lambda: at.status().trust_reason != "event feed is silent")


async def test_an_engine_that_comes_back_with_another_model_is_another_engine(
    tmp_path: Path,
) -> None:
    tokenizers = {name: str(tmp_path / "tokenizer") for name in (MODEL, "another")}
    flags = {"render.tokenizers": json.dumps(tokenizers)}
    async with lab(tmp_path, emulated(), **flags) as at:
        await at.until(at.exact)
        await keeps_affinity(at, "before " * 20)
        await at.engines[0].restart(model="another")
        await at.until(lambda: at.status().models == ("another",))
        await at.until(at.exact)
        await at.until(lambda: not at.status().index_blocks)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        url = f"{at.gateway.url}/v1/chat/completions"
        async with at.session.post(url, json=body) as reply:
            assert reply.status == 404, await reply.text()
        cold = await at.say(SYSTEM, "before " * 20, model="another")
        assert (cold.predicted, cold.cached or 0) == (0, 0)
        await keeps_affinity(at, "before " * 20, model="another")


async def test_events_of_kinds_that_nobody_knows_are_counted_and_the_others_hold(
    tmp_path: Path,
) -> None:
    future = [
        ["BlockBlessed", [1, 2], {"by": "a release of next year"}],
        {"type": "CacheResized", "blocks": 100},
    ]
    async with lab(tmp_path, emulated()) as at:
        await at.until(at.exact)
        publisher = at.engines[0].publisher
        assert publisher is not None
        await publisher.publish(msgspec.msgpack.encode([0.0, future, 0]))
        await at.until(lambda: at.gateway.feeds.stats.unknown_events == len(future))
        await keeps_affinity(at, "hello " * 20)
        assert at.exact()
        assert not at.gateway.feeds.stats.malformed_events
