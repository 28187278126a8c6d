"""B01: a popular prefix does not bury its holder while the others idle.

Scaled: 0.2 s per request instead of 0.5 s; each worker serves 4 at a time and queues the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from cachestub import Engine, post, shares, words
from caserig import COMPLETIONS
from integration.conftest import Served
from rig import CHAT, Stub

BURST = 64


async def burst(
    served: Served, texts: list[str], path: str, stream: bool
) -> tuple[list[int], float]:
    """All at once: the share of each worker, and the seconds until the last answer."""
    begun = time.monotonic()
    workers = await asyncio.gather(*(post(served.url, text, path, stream=stream) for text in texts))
    return shares(workers, served.stubs), time.monotonic() - begun


async def four(stub: Callable[..., Awaitable[Stub]]) -> list[Engine]:
    return [Engine(await stub()) for _ in range(4)]


@pytest.mark.parametrize(
    ("path", "stream", "prefix", "tail", "size"),
    [
        (CHAT, False, 2000, 20, BURST),
        (CHAT, True, 2000, 20, BURST),
        (COMPLETIONS, False, 2000, 20, BURST),
        (CHAT, False, 300, 500, BURST),
        (CHAT, False, 8000, 20, BURST),
        (CHAT, False, 2000, 0, BURST),
        (CHAT, True, 2000, 0, BURST),
        (CHAT, False, 2000, 20, 19),
    ],
    ids=["chat", "stream", "completions", "short", "long", "same", "stream-same", "small"],
)
async def test_a_burst_on_one_prefix_uses_all_workers(
    stub, serve, path: str, stream: bool, prefix: int, tail: int, size: int
) -> None:
    hot = words(prefix, 1)
    texts = [hot + words(tail, 100 + n) for n in range(size)]
    took = {}
    for policy in ("least_loaded", "cost"):
        engines = await four(stub)
        served = await serve(*(e.stub for e in engines), **{"routing.policy": policy})
        warm = await post(served.url, hot, path)
        before = await post(served.url, hot, path)
        counts, took[policy] = await burst(served, texts, path, stream)
        if policy == "cost":
            assert before == warm
            assert min(counts) >= 1, counts
            assert max(counts) <= 2.5 * len(texts) / 4, counts
            holders = {
                e.stub.id for e in engines if e.cached("user\n" + hot if path == CHAT else hot)
            }
            for _ in range(5):
                assert await post(served.url, texts[0], path) in holders
    assert took["cost"] <= 1.6 * took["least_loaded"] + 0.5, took


async def test_a_hot_prefix_that_nobody_holds_yet(stub, serve) -> None:
    """The first of the burst is also the first of all."""
    engines = await four(stub)
    served = await serve(*(e.stub for e in engines))
    hot = words(2000, 2)
    counts, _ = await burst(served, [hot + words(20, n) for n in range(BURST)], CHAT, False)
    assert min(counts) >= 1, counts
    assert max(counts) <= 2.5 * BURST / 4, counts


async def test_bursts_on_two_prefixes_at_once(stub, serve) -> None:
    """Each has its own holder, and neither is buried."""
    engines = await four(stub)
    served = await serve(*(e.stub for e in engines))
    hot = [words(2000, 3), words(2000, 4)]
    for one in hot:
        await post(served.url, one)
    texts = [hot[n % 2] + words(20, n) for n in range(BURST)]
    counts, _ = await burst(served, texts, CHAT, False)
    assert min(counts) >= 1, counts
    assert max(counts) <= 2.5 * BURST / 4, counts
