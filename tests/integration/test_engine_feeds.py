"""Engines' event streams reach the index exactly, and what goes wrong with them is named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from enginekit import Lab, emulated, lab

from gateway.emulators import Emulator, eventforms, publisher
from gateway.emulators.cache import CacheNews
from gateway.feeds import enginefeed, roads, zmqstream
from shared.openai import RouteKind, parse

STATED_S = 3.0
"""What docs/engines say: a fault is noticed and named by then. Tests give ten times as much."""
LINGER_S = 1.1
"""What was promised counts for a second after its attempt."""
SYSTEM = "You are the keeper of the river. " * 12


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that are usually half a second apart."""
    monkeypatch.setattr(zmqstream, "POLL_S", 0.05)
    monkeypatch.setattr(enginefeed, "WAIT_S", 0.05)
    monkeypatch.setattr(roads, "TICK_S", 0.05)


async def talk(at: Lab, turns: int = 3) -> None:
    """A conversation of which each turn finds what the one before has left."""
    texts = ["turn 0 " + "of the water " * 3]
    for turn in range(turns):
        said = await at.say(SYSTEM, *texts)
        size = at.status().block_size
        await at.until(at.in_step)
        assert abs(said.predicted - (said.cached or 0)) < max(16, size)
        texts += [said.text, f"turn {turn + 1} " + "of the water " * 3]


ENGINES = [
    ("vllm", {"form": "map"}),
    ("vllm", {"form": "array"}),
    ("vllm", {"block_size": 32}),
    ("vllm", {"block_size": 8}),
    ("vllm", {"block_size": 784, "blocks": 64}),
    ("vllm", {"replay": False}),
    ("sglang", {"form": "map"}),
    ("sglang", {"form": "array"}),
    ("sglang", {"block_size": 1, "blocks": 40_000}),
]


@pytest.mark.parametrize(("engine", "more"), ENGINES, ids=str)
async def test_an_engine_with_events_is_known_exactly(
    tmp_path: Path, engine: str, more: dict[str, Any]
) -> None:
    async with lab(tmp_path, emulated(engine, **more)) as at:
        await at.until(at.exact)
        assert at.status().engine == engine
        assert at.status().block_size == more.get("block_size", 16)
        await talk(at)
        again = await at.say(SYSTEM, "the same prompt for a second time " * 20)
        again = await at.say(SYSTEM, "the same prompt for a second time " * 20)
        assert again.predicted == again.cached
        assert at.status().trust == "exact"


async def free_pair() -> tuple[publisher.Publisher, publisher.Publisher]:
    """Publishers of two ranks, on ports next to each other."""
    context = zmq.asyncio.Context()
    while True:
        one, two = publisher.Publisher(context), publisher.Publisher(context)
        await one.bind("127.0.0.1")
        try:
            two._pub.bind(f"tcp://127.0.0.1:{one.port + 1}")
        except zmq.ZMQError:
            await one.close()
            await two.close()
            continue
        return one, two


async def test_of_several_ranks_only_what_all_hold_is_believed(tmp_path: Path) -> None:
    ranks = await free_pair()
    engine = Emulator(emulated(events=False))
    await engine.start()
    static = [
        {"url": engine.url, "events": f"tcp://127.0.0.1:{ranks[0].port}", "ranks": 2}
        | {"replay": "none", "engine": "vllm"}
    ]
    try:
        async with lab(tmp_path, **{"workers.static": json.dumps(static)}) as at:
            at.engines.append(engine)
            await at.until(lambda: "several ranks" in at.status().trust_reason)
            news = CacheNews("stored", (1, 2, 3), None, tuple(range(48)))
            batch = eventforms.encode("vllm", "map", [news], 16, 0.0)
            await ranks[0].publish(batch)
            await asyncio.sleep(0.3)
            assert not at.status().index_blocks
            await ranks[1].publish(batch)
            await at.until(lambda: at.status().index_blocks == 3)
            assert at.status().trust == "learned"
    finally:
        for rank in ranks:
            await rank.close()
        ranks[0]._context.destroy(linger=0)


async def test_evictions_are_followed(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated(blocks=120)) as at:
        await at.until(at.exact)
        for number in range(12):
            await at.say(f"{number} " + "prompt that fills the pool " * 20, "x")
            await at.until(at.in_step)
        await asyncio.sleep(LINGER_S)
        cold = await at.say("0 " + "prompt that fills the pool " * 20, "x")
        assert (cold.predicted, cold.cached) == (0, 0)
        assert at.status().trust == "exact"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_salts_are_scopes(tmp_path: Path, engine: str) -> None:
    async with lab(tmp_path, emulated(engine)) as at:
        await at.until(at.exact)
        for salt in ("", "pepper", "cumin"):
            more = {"cache_salt": salt} if salt else {}
            cold = await at.say(SYSTEM, "hello", **more)
            await at.until(at.in_step)
            warm = await at.say(SYSTEM, "hello", **more)
            assert (cold.predicted, cold.cached or 0) == (0, 0)
            assert warm.predicted == warm.cached > 0


async def warm_up(engines: list[Emulator]) -> None:
    """Serve a prompt before any gateway is there."""
    for engine in engines:
        body = b'{"model":"emulated","max_tokens":8,"prompt":"' + b"a river " * 40 + b'"}'
        running = await engine.prefill(parse(RouteKind.COMPLETIONS, body))
        async for _ in engine.decode(running):
            pass
        await engine.finish(running)


async def test_who_joins_late_learns_the_whole_past_from_the_replay(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated(), before=warm_up) as at:
        await at.until(at.exact)
        assert at.in_step()
        assert at.status().index_blocks > 10


async def test_who_joins_late_without_a_replay_says_so_until_the_cache_was_filled_anew(
    tmp_path: Path,
) -> None:
    settings = emulated(replay=False, blocks=100, form="array")
    async with lab(tmp_path, settings, before=warm_up) as at:
        await at.until(lambda: "before is not known" in at.status().trust_reason)
        assert at.status().trust == "learned"
        # Learned from its answer; of its eviction the events will only give a name without meaning.
        body = {"model": "emulated", "max_tokens": 1, "prompt": "a river " * 40}
        async with at.session.post(f"{at.gateway.url}/v1/completions", json=body) as reply:
            assert (await reply.json())["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert at.status().index_blocks > 10
        for number in range(10):
            await at.say(f"{number} " + "prompt that fills the pool " * 15, "x")
        await at.until(at.exact)
        await at.until(at.in_step)


async def test_vllm_tells_again_what_requests_reuse_to_who_joined_late(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated(replay=False), before=warm_up) as at:
        await at.until(lambda: "before is not known" in at.status().trust_reason)
        body = {"model": "emulated", "max_tokens": 8, "prompt": "a river " * 40}
        seen = []
        for _ in range(2):
            url = f"{at.gateway.url}/v1/completions"
            async with at.session.post(url, json=body) as reply:
                told = (await reply.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
                seen.append((int(reply.headers["x-headwater-matched-tokens"]), told))
            await at.until(at.in_step)
        assert seen[0][0] == 0 < seen[0][1]
        assert seen[1][0] == seen[1][1]


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_restart_under_the_same_name_empties_what_was_known(
    tmp_path: Path, engine: str, replay: bool
) -> None:
    async with lab(tmp_path, emulated(engine, replay=replay)) as at:
        await at.until(at.exact)
        await talk(at)
        epoch = at.status().epoch
        await at.engines[0].restart()
        await at.until(lambda: at.status().epoch != epoch, 10 * STATED_S)
        await at.until(lambda: not at.status().index_blocks)
        await at.until(at.exact, 10 * STATED_S)
        cold = await at.say(SYSTEM, "turn 0 of the water")
        assert (cold.predicted, cold.cached or 0) == (0, 0)
        await talk(at)
        assert at.gateway.feeds.stats.engine_restarts >= 1


async def test_lost_events_are_had_again_from_the_replay(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated()) as at:
        await at.until(at.exact)
        await talk(at, 1)
        at.engines[0].lose(2)
        await at.say(SYSTEM, "what is lost " * 20)
        await at.say("another " * 30, "and what shows the hole")
        await at.until(at.in_step, 10 * STATED_S)
        assert at.exact()
        assert at.gateway.feeds.stats.engine_gaps >= 1
        assert not at.gateway.feeds.stats.engine_losses


@pytest.mark.parametrize("more", [{"replay": False}, {"kept": 1}], ids=str)
async def test_events_that_are_lost_for_good_are_named_and_nothing_wrong_is_believed(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    async with lab(tmp_path, emulated(**more)) as at:
        await at.until(at.exact)
        await talk(at, 1)
        at.engines[0].lose(3, keep=False)
        await at.say(SYSTEM, "what is lost " * 20)
        await at.say("another " * 30, "lost as well")
        await at.say("yet another " * 30, "and what shows the hole")
        await at.until(lambda: "were lost" in at.status().trust_reason, 10 * STATED_S)
        assert at.status().trust == "learned"
        known = await at.say("yet another " * 30, "and what shows the hole")
        assert known.predicted <= (known.cached or 0)


async def test_a_block_size_that_changes_at_a_restart_is_taken_over(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated()) as at:
        await at.until(at.exact)
        await talk(at, 1)
        await at.engines[0].restart(block_size=32)
        await at.until(lambda: at.status().block_size == 32 and at.exact(), 10 * STATED_S)
        await talk(at)


async def test_a_block_size_that_only_the_events_show_is_believed(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated(engine="vllm")) as at:
        await at.until(at.exact)
        engine = at.engines[0]
        # The pool's blocks are larger than the engine says of itself, as under context parallelism.
        told = engine.settings
        await engine.restart(block_size=64)
        engine.settings = told
        await at.until(lambda: at.status().index_blocks == 0)
        await at.say(SYSTEM, "a prompt of some blocks " * 10)
        await at.until(lambda: at.status().block_size == 64, 10 * STATED_S)
        await at.until(at.exact, 10 * STATED_S)
        warm = await at.say(SYSTEM, "a prompt of some blocks " * 10)
        assert warm.predicted == warm.cached > 0


async def test_another_known_encoding_after_a_restart_is_no_fault(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated(form="array")) as at:
        await at.until(at.exact)
        await talk(at, 1)
        await at.engines[0].restart(form="map")
        await at.until(lambda: not at.status().index_blocks, 10 * STATED_S)
        await at.until(at.exact, 10 * STATED_S)
        await talk(at)


async def test_an_encoding_that_nobody_knows_is_named_and_routing_goes_on_by_learning(
    tmp_path: Path,
) -> None:
    async with lab(tmp_path, emulated(), emulated()) as at:
        await at.until(at.exact)
        for engine in at.engines:
            await engine.restart(form="garbage")
        await at.until(lambda: at.gateway.feeds.stats.engine_restarts >= 2, 10 * STATED_S)
        first = await at.say(SYSTEM, "hello there " * 20)
        which = [engine.id for engine in at.engines].index(first.worker)
        await at.until(lambda: "cannot be read" in at.status(which).trust_reason, 10 * STATED_S)
        assert at.status(which).trust == "learned"
        for _ in range(4):
            again = await at.say(SYSTEM, "hello there " * 20)
            assert again.worker == first.worker
            assert again.predicted <= (again.cached or 0)
        assert at.gateway.feeds.stats.malformed_frames >= 1


async def test_an_engine_whose_event_port_is_closed_is_learned_and_the_reason_says_where(
    tmp_path: Path,
) -> None:
    async with lab(tmp_path, emulated()) as at:
        await at.until(at.exact)
        publisher = at.engines[0].publisher
        assert publisher is not None
        await publisher.close()
        at.engines[0].publisher = None
        await at.until(lambda: "nobody publishes at" in at.status().trust_reason, 10 * STATED_S)
        assert at.status().trust == "learned"
        first = await at.say(SYSTEM, "hello")
        second = await at.say(SYSTEM, "hello")
        assert second.predicted > 0
        assert first.worker == second.worker


@pytest.mark.parametrize("engine", ["llamacpp", "tgi"])
async def test_engines_without_events_are_recognised_and_learned(
    tmp_path: Path, engine: str
) -> None:
    async with lab(tmp_path, emulated(engine), emulated(engine)) as at:
        await at.until(lambda: at.status().engine == engine and at.status().trust == "learned")
        first = await at.say(SYSTEM, "hello " * 30)
        second = await at.say(SYSTEM, "hello " * 30)
        assert first.worker == second.worker
        assert second.predicted > 0
        if engine == "llamacpp":
            assert second.cached == second.prompt - 1
        await at.until(lambda: at.status().load_age_s is not None)


async def test_a_gateway_that_does_not_keep_up_gets_what_it_missed_from_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queues for live events are as short as ZMQ makes them: what does not fit is dropped."""
    monkeypatch.setattr(zmqstream, "QUEUE", 1)
    monkeypatch.setattr(publisher, "QUEUE", 1)
    async with lab(tmp_path, emulated()) as at:
        await at.until(at.exact)
        engine = at.engines[0]
        assert engine.publisher is not None
        big = msgspec.msgpack.encode([0.0, [], 0, "a field of the future" * 50_000])
        for _ in range(30):
            # Megabytes that nobody reads meanwhile, and that mean nothing.
            await engine.publisher.publish(big)
        await talk(at, 2)
        assert at.gateway.feeds.stats.engine_gaps >= 1
        assert at.exact()
