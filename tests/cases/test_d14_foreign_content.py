"""D14: a conversation never gets what belongs to another one, and reports only what it can share.

Scaled: 60 conversations of three turns (the case's 200 with HEADWATER_TEST_DEPTH above 1), in
random order, 16 at a time, on a pool of 60 blocks; a worker without a cache gives what is right.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from caserig import COMPLETIONS, settles
from conftest import WorkerLauncher, WorkerProcess
from depth import DEPTH
from rig import CHAT

BLOCKS = 60
CONVERSATIONS = 60 if DEPTH == 1 else 200
SPEED = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "0",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "0",
    "HEADWATER_SCHEDULE__MAX_BATCH_TOKENS": "128",
}
SYSTEMS = ["You are a helpful assistant. " * 3, "Answer in rhymes, and never in prose. " * 2, ""]
SALTS = [None, None, "red", "blue"]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """The worker under test, and one without a cache."""
    launcher = WorkerLauncher(tmp_path_factory.mktemp("foreign"))
    launcher("--kv-blocks", str(BLOCKS), env=SPEED, wait=False)
    launcher("--no-prefix-cache", "--kv-blocks", "2000", env=SPEED, wait=False)
    for worker in launcher.workers:
        worker.await_ready()
    yield launcher.workers
    launcher.end()


class Seen:
    """What the worker under test has been sent, by salt, answers included."""

    def __init__(self) -> None:
        self._known: dict[str | None, list[bytes]] = {}

    def add(self, salt: str | None, text: bytes) -> int:
        """From now on it may be shared, in flight or not; returns its number."""
        known = self._known.setdefault(salt, [])
        known.append(text)
        return len(known) - 1

    def longest(self, salt: str | None, own: int) -> int:
        """Bytes (tokens) that a request has in common with anything else under its salt."""
        known = self._known[salt]
        others = known[:own] + known[own + 1 :]
        return max((common(known[own], other) for other in others), default=0)


def common(one: bytes, two: bytes) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == two[:middle] else (low, middle - 1)
    return low


async def ask(http: aiohttp.ClientSession, worker: WorkerProcess, path: str, body: Any) -> Any:
    """A decoded answer."""
    async with http.post(worker.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_conversations_with_canaries(workers) -> None:
    rng = random.Random("D14")
    seen, gate = Seen(), asyncio.Semaphore(16)
    hits: list[int] = []
    turns = [number for number in range(CONVERSATIONS) for _ in range(3)]
    rng.shuffle(turns)
    texts = {
        n: f"{SYSTEMS[n % 3]}canary-{rng.getrandbits(64):016x}\n" for n in range(CONVERSATIONS)
    }
    locks = {number: asyncio.Lock() for number in range(CONVERSATIONS)}

    async def turn(http: aiohttp.ClientSession, number: int) -> None:
        async with locks[number], gate:
            texts[number] += f"user: question {rng.randint(0, 9)}\nassistant: "
            salt = SALTS[number % 4]
            body = {"model": "fake", "prompt": texts[number], "max_tokens": 24, "temperature": 0}
            body |= {} if salt is None else {"cache_salt": salt}
            own = seen.add(salt, texts[number].encode())
            answer = await ask(http, workers[0], COMPLETIONS, body)
            right = await ask(http, workers[1], COMPLETIONS, body)
            assert answer["choices"] == right["choices"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # Asked only now: what came in meanwhile may be shared while it is in flight.
            assert cached <= seen.longest(salt, own)
            hits.append(cached)
            texts[number] += answer["choices"][0]["text"] + "\n"
            seen.add(salt, texts[number].encode())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(turn(http, number) for number in turns))
        await settles(lambda: idle(http, workers[0]), 2.0)
    assert len(hits) == 3 * CONVERSATIONS
    assert sum(hits) > 500
    canaries = [text.split("\n")[0][-16:] for text in texts.values()]
    assert all(text.count(mark) == 1 for text, mark in zip(texts.values(), canaries, strict=True))


async def idle(http: aiohttp.ClientSession, worker: WorkerProcess) -> bool:
    """Nothing runs and no block is in use."""
    async with http.get(worker.url + "/headwater/load") as answer:
        load = await answer.json()
    return not any(load[name] for name in ("running", "waiting", "blocks_used"))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_words_under_different_salts_share_nothing(workers, stream) -> None:
    async with aiohttp.ClientSession() as http:
        text = f"one long secret that two of them know, streamed or not: {stream} " * 4
        messages = [{"role": "user", "content": text}]
        for salt in ("a", "b", None, "ab", "a b", "\u00e9"):
            body: dict[str, Any] = {"model": "fake", "messages": messages, "max_tokens": 2}
            body |= {} if salt is None else {"cache_salt": salt}
            first, again = [await ask(http, workers[0], CHAT, body) for _ in range(2)]
            cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again)]
            assert cached == [0, (first["usage"]["prompt_tokens"] - 1) // 16 * 16]
