"""D01 to D05 from outside and in numbers (scaled: 2000 requests instead of 5000 in D04).

A worker process without torch, whose tokens are a function of what is *read from its blocks*, on a
pool of 40 blocks, beside one without a cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from caserig import settles
from conftest import WorkerLauncher, WorkerProcess

B = 16
BLOCKS = 40
SPEED = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "0",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "0",
    "HEADWATER_SCHEDULE__MAX_BATCH_TOKENS": "64",
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The worker under test, and the one whose answers are right."""
    launcher = WorkerLauncher(tmp_path_factory.mktemp("served"))
    launcher("--kv-blocks", str(BLOCKS), env=SPEED, wait=False)
    launcher("--no-prefix-cache", "--kv-blocks", "2000", env=SPEED, wait=False)
    for worker in launcher.workers:
        worker.await_ready()
    yield launcher.workers
    launcher.end()


@dataclass
class Served:
    """Both, and a client."""

    worker: WorkerProcess
    right: WorkerProcess
    http: aiohttp.ClientSession
    known: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    async def ask(self, body: dict[str, Any], worker: WorkerProcess | None = None) -> Any:
        """The answer of the worker under test, or of another one."""
        url = (worker or self.worker).url + "/v1/completions"
        async with self.http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def expected(self, body: dict[str, Any]) -> tuple[Any, ...]:
        """What must be said."""
        key = repr(body)
        if key not in self.known:
            self.known[key] = said(await self.ask(body, self.right))
        return self.known[key]

    async def blocks(self) -> dict[str, int]:
        """Blocks by state, as the worker's admin listener tells."""
        async with self.http.get(self.worker.admin_url + "/admin/cache") as answer:
            blocks: dict[str, int] = (await answer.json())["blocks"]
            return blocks

    async def idle(self) -> bool:
        """Nothing runs, nothing waits, no block is in use, none is lost."""
        async with self.http.get(self.worker.url + "/headwater/load") as answer:
            load = await answer.json()
        blocks = await self.blocks()
        whole = blocks["free"] + blocks["cached"] == blocks["total"] == BLOCKS
        return whole and not any(
            load.get(name, 0) for name in ("running", "waiting", "blocks_used")
        )


@pytest.fixture
async def served(processes) -> AsyncIterator[Served]:
    """A client of both; the worker is idle after each test."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        made = Served(processes[0], processes[1], http)
        yield made
        await settles(made.idle, 10.0)


def request(tokens: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy completion of token ids."""
    return {"model": "fake", "prompt": tokens, "temperature": 0, "max_tokens": max_tokens, **more}


def said(answer: Any) -> tuple[Any, ...]:
    """Text, end and log-probabilities."""
    choice = answer["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    return choice["text"], choice["finish_reason"], logprobs and tuple(logprobs)


def cached(answer: Any) -> int:
    """Reused tokens, as reported."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def tokens_of(rng: random.Random, length: int) -> list[int]:
    """Random letters."""
    return rng.choices(range(97, 123), k=length)


def families(rng: random.Random, n: int, low: int, high: int) -> list[list[int]]:
    """Prompts of ``low`` to ``high`` blocks, half of them branching off from another one."""
    made = [tokens_of(rng, rng.randint(low * B, high * B))]
    while len(made) < n:
        stem = rng.choice(made)[: rng.randint(0, high * B)] if rng.random() < 0.5 else []
        length = rng.randint(low * B, high * B)
        made.append((stem + tokens_of(rng, length))[:length])
    return made


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 8 * B])
async def test_d01_four_times_the_same(served, length) -> None:
    body = request(
        tokens_of(random.Random(f"D01 {length}"), length), 32, logprobs=5, ignore_eos=True
    )
    for turn in range(4):
        answer = await served.ask(body)
        assert said(answer) == await served.expected(body)
        assert cached(answer) == (0 if turn == 0 else (length - 1) // B * B)
        assert cached(answer) < answer["usage"]["prompt_tokens"] == length


async def test_d02_three_hundred_random_requests(served) -> None:
    rng = random.Random("D02")
    prefixes = [tokens_of(rng, rng.randint(1, 400)) for _ in range(20)]
    bodies = []
    for _ in range(300):
        tokens = rng.choice(prefixes) + tokens_of(rng, rng.randint(0, 50))
        stop = {"stop": ["".join(rng.choices("etao ", k=2))]} if rng.random() < 0.2 else {}
        bodies.append(request(tokens, rng.randint(1, 40), **stop))
    for at_once in (1, 8):
        gate = asyncio.Semaphore(at_once)

        async def one(body: dict[str, Any], gate: asyncio.Semaphore = gate) -> None:
            async with gate:
                assert said(await served.ask(body)) == await served.expected(body)

        await asyncio.gather(*map(one, bodies))


async def test_d03_identical_ones_at_once(served) -> None:
    for turn in range(12):
        rng = random.Random(f"D03 {turn}")
        same = request(tokens_of(rng, 10 * B), 8)
        answers = await asyncio.gather(*(served.ask(same) for _ in range(32)))
        right = await served.expected(same)
        assert [said(answer) for answer in answers] == [right] * 32
        shared = tokens_of(rng, 9 * B)
        tails = [request(shared + tokens_of(rng, B), 8) for _ in range(16)]
        answers = await asyncio.gather(*map(served.ask, tails))
        assert [said(answer) for answer in answers] == [await served.expected(b) for b in tails]


async def test_d04_a_storm_on_forty_blocks(served) -> None:
    rng = random.Random("D04")
    prompts = families(rng, 200, 3, 20)
    bodies = [request(rng.choice(prompts), rng.choice((1, 6, 20))) for _ in range(2000)]
    gate = asyncio.Semaphore(24)
    hits = []
    looks = 0

    async def one(body: dict[str, Any]) -> None:
        async with gate:
            answer = await served.ask(body)
        assert said(answer) == await served.expected(body)
        assert cached(answer) < len(body["prompt"])
        hits.append(cached(answer))

    async def watch() -> None:
        nonlocal looks
        while True:
            blocks = await served.blocks()
            assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["total"] == BLOCKS
            looks += 1
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(one, bodies))
    assert not watching.done()
    watching.cancel()
    assert looks > 10
    assert sum(hits) > 0


async def test_d05_clients_that_leave(served) -> None:
    rng = random.Random("D05")
    prompts = families(rng, 60, 1, 14)
    gate = asyncio.Semaphore(40)
    left = finished = stayed = 0

    async def one() -> None:
        nonlocal left, finished, stayed
        body = request(rng.choice(prompts), rng.choice((1, 5, 60)), stream=rng.random() < 0.5)
        if not body["stream"]:
            body["n"] = rng.choice((1, 1, 3))
        patience = rng.choice((0.0, 0.002, 0.01, 0.03, 0.08, 0.2)) * rng.random()
        stays = rng.random() < 0.02  # how many of the others see an end depends on the machine
        stayed += stays
        async with gate:
            try:
                async with (
                    asyncio.timeout(None if stays else patience),
                    served.http.post(served.worker.url + "/v1/completions", json=body) as answer,
                ):
                    assert answer.status == 200
                    await answer.read()
                    finished += 1
            except TimeoutError:
                left += 1

    await asyncio.gather(*(one() for _ in range(3000)))
    assert left > 1000
    assert finished >= stayed > 20
    await settles(served.idle, 10.0)
    whole = request(tokens_of(rng, BLOCKS * B - 4), 4, ignore_eos=True)
    async with asyncio.timeout(30):
        answer = await served.ask(whole)
    assert said(answer) == await served.expected(whole)


async def test_the_comparison_can_fail(served) -> None:
    """A right answer depends on every token of its prompt."""
    rng = random.Random("sanity")
    tokens = tokens_of(rng, 8 * B)
    right = await served.expected(request(tokens, 32, ignore_eos=True))
    for place in (0, B, 8 * B - 1):
        other = [*tokens]
        other[place] = 97 + (other[place] - 96) % 26
        assert await served.expected(request(other, 32, ignore_eos=True)) != right
