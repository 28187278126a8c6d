"""Each kind of loss planted on a live run: the report names it, to the token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from rig import RawClient, ask, eventually

from gateway.decision import Booked
from gateway.index.base import Applied
from gateway.report import read_ledger, summarise
from gateway.routing.base import Trust
from shared.types import WorkerId

POLICY = ("x-headwater-policy", "round_robin")
BLOCKS = "200"
QUICK = {"HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "50", "HEADWATER_FAKE__DECODE_MS_PER_STEP": "1"}
LOSSES = ("evicted", "diverted_for_load", "draining", "policy", "isolation", "stale_index",
          "token_mismatch", "unreported", "gained")  # fmt: skip


class Run:
    """A gateway over fake workers, prompts as token ids, and what was planted."""

    def __init__(self, served: Any, workers: dict[str, Any], seed: int) -> None:
        self.served, self.workers = served, workers
        self.rng = Random(seed)
        self.router = served.gateway.router
        self.planted: dict[str, int] = dict.fromkeys(LOSSES, 0)
        self._numbers = count(1)

    def prompt(self, blocks: int) -> list[int]:
        """So many full blocks and one token more, unlike every other prompt."""
        first = [256 + next(self._numbers) % 200, self.rng.randrange(250)]
        return [first[1], *(self.rng.randrange(250) for _ in range(16 * blocks))]

    async def send(self, tokens: list[int], *headers: tuple[str, str], **fields: Any) -> str:
        """One request; the worker that answered."""
        body = {"model": "fake", "prompt": tokens, "max_tokens": 1, "temperature": 0, **fields}
        reply = await ask(self.served.url, "/v1/completions", body, *headers)
        assert reply.status == 200, reply.body
        worker = reply.header("x-headwater-worker")
        assert worker is not None
        return worker

    async def warm(self, tokens: list[int], **fields: Any) -> str:
        """Send a prompt and wait until the index knows that its worker holds it."""
        worker = await self.send(tokens, **fields)
        await self.known(tokens, worker, **fields)
        return worker

    async def known(self, tokens: list[int], worker: str, **fields: Any) -> None:
        """Wait until the index says that ``worker`` holds all of the prompt; that it is on its way
        there is believed at once."""
        wanted = (len(tokens) - 1) // 16 * 16

        async def there() -> bool:
            body = {"model": "fake", "prompt": tokens, **fields}
            told = (await ask(self.served.admin, "/admin/index/who", body)).json
            held = {one["id"]: one["tokens"] - one["promised_tokens"] for one in told["holders"]}
            return held.get(worker) == wanted

        async with asyncio.timeout(20):
            while not await there():  # noqa: ASYNC110 - it is asked over HTTP
                await asyncio.sleep(0.02)

    def other(self, worker: str) -> str:
        """The second worker."""
        return next(name for name in self.workers if name != worker)


@pytest.fixture
def run(worker_process: Any, serve: Any, tmp_path: Path) -> Callable[..., Any]:
    """``await run(seed)``: two fake workers, exact, and a gateway with a ledger in ``tmp_path``."""

    async def start(seed: int = 1) -> Run:
        started = [worker_process("--kv-blocks", BLOCKS, env=QUICK, wait=False) for _ in range(2)]
        for worker in started:
            await asyncio.to_thread(worker.await_ready)
        served = await serve(
            **{
                "workers.urls": ",".join(worker.url for worker in started),
                "ledger.dir": str(tmp_path / "ledger"),
                "routing.allow_policy_header": True,
            }
        )
        router = served.gateway.router
        await eventually(
            lambda: [w.trust for w in router.workers(0.0)] == [Trust.EXACT, Trust.EXACT], 30
        )
        by_url = {worker.url: worker for worker in started}
        found = {str(w.id): by_url[w.url] for w in router.workers(0.0)}
        return Run(served, found, seed)

    return start


async def diverted(run: Run) -> None:
    """Another gateway has booked a minute of work on the worker that holds the prompt."""
    tokens = run.prompt(21)
    holder = await run.warm(tokens)
    loop = asyncio.get_running_loop()
    busy = {WorkerId(holder): Booked(60.0, 0, 1)}
    run.router.apply_peer_bookings("other", busy, loop.time())
    assert await run.send(tokens) == run.other(holder)
    run.router.apply_peer_bookings("other", {}, loop.time())
    run.planted["diverted_for_load"] = 21 * 16


async def drained(run: Run) -> None:
    """An operator drains the worker that holds the prompt."""
    tokens = run.prompt(22)
    holder = await run.warm(tokens)
    assert (await ask(run.served.admin, f"/admin/workers/{holder}/drain", b"")).status == 200
    assert await run.send(tokens) == run.other(holder)
    assert (await ask(run.served.admin, f"/admin/workers/{holder}/undrain", b"")).status == 200
    run.planted["draining"] = 22 * 16


async def left_to_a_policy(run: Run) -> None:
    """Round-robin is asked for, and it is the other worker's turn."""
    tokens, filler = run.prompt(23), run.prompt(1)
    holder = await run.warm(tokens)
    while await run.send(filler, POLICY) != holder:
        filler = run.prompt(1)
    assert await run.send(tokens, POLICY) == run.other(holder)
    run.planted["policy"] = 23 * 16


async def salted(run: Run) -> None:
    """Another tenant's salt keeps the same prompt apart: salted from plain, and two salts."""
    for first, second, blocks in (({}, {"cache_salt": "a"}, 24), ({"cache_salt": "b"}, {}, 25),
                                  ({"cache_salt": "c"}, {"cache_salt": "d"}, 26)):  # fmt: skip
        tokens = run.prompt(blocks)
        await run.warm(tokens, **first)
        await run.send(tokens, **second)
        run.planted["isolation"] += blocks * 16


async def stale(run: Run) -> None:
    """A worker's cache is emptied, and the news of it is lost on the way."""
    tokens = run.prompt(27)
    holder = await run.warm(tokens)
    real = run.router.apply_events
    run.router.apply_events = lambda batch, now: Applied(True, "lost")
    async with httpx.AsyncClient(trust_env=False) as client:
        flushed = await client.post(f"{run.workers[holder].admin_url}/admin/cache/flush")
        assert flushed.status_code == 200
    assert await run.send(tokens) == holder
    run.planted["stale_index"] = 27 * 16
    run.router.apply_events = real


async def other_tokens(run: Run) -> None:
    """From now on the engine puts one more token before each prompt: another template."""
    tokens = run.prompt(28)
    holder = await run.warm(tokens)
    upstream = run.served.gateway.pipeline._upstream
    real = upstream.open

    def spoilt(url: str, path: str, headers: Any, body: bytes, **more: Any) -> Any:
        return real(url, path, headers, body.replace(b'"prompt": [', b'"prompt": [7, '), **more)

    upstream.open = spoilt
    assert await run.send(tokens) == holder
    upstream.open = real
    run.planted["token_mismatch"] = 28 * 16


async def evicted(run: Run) -> None:
    """The only copy of a prompt is pushed out of the worker's memory by others."""
    tokens = run.prompt(29)
    holder = await run.warm(tokens)
    run.router.drain(WorkerId(run.other(holder)), 0.0)
    for _ in range(3):
        await run.warm(run.prompt(90))
    run.router.undrain(WorkerId(run.other(holder)), 0.0)

    async def gone() -> bool:
        body = {"model": "fake", "prompt": tokens}
        told = (await ask(run.served.admin, "/admin/explain", body)).json
        return max(one["matched_tokens"] for one in told["workers"]) == 0

    async with asyncio.timeout(20):
        while not await gone():  # noqa: ASYNC110 - it is asked over HTTP
            await asyncio.sleep(0.02)
    await run.send(tokens)
    run.planted["evicted"] = 29 * 16


async def test_every_planted_loss_is_named_with_its_exact_number_of_tokens(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    live: Run = await run()
    faults = (diverted, drained, left_to_a_policy, salted, other_tokens, evicted, stale)
    for fault in faults:
        await fault(live)
    await eventually(lambda: live.served.inflight() == 0)
    reply = await ask(live.served.admin, "/admin/report")
    assert reply.status == 200
    totals = reply.json["totals"]
    told = {name: totals[name] for name in LOSSES}
    records = list(read_ledger([tmp_path / "ledger"]))
    assert told == live.planted, [(r.flow, r.why) for r in records if r.flow.prompt > 300]
    report = summarise([tmp_path / "ledger"], by=["policy"])
    assert report.totals == totals
    assert {group.key["policy"] for group in report.groups} == {"cost", "round_robin"}
    state = await first_state(live.served.admin)
    assert {name: state["totals"][name] for name in LOSSES} == live.planted


async def first_state(url: str) -> dict[str, Any]:
    """What the dashboard shows."""
    import json

    client = await RawClient.connect(url)
    try:
        await client.send("GET", "/dashboard/events")
        await client.reader.readuntil(b"\r\n\r\n")
        text = b""
        while b"\n\n" not in text:
            text += await anext(client.chunks())
        data = text.split(b"\n\n")[0].split(b"\n")[1]
        return json.loads(data.removeprefix(b"data: "))  # type: ignore[no-any-return]
    finally:
        client.abort()


async def test_a_clean_run_predicts_what_is_delivered(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Conversations side by side, each turn longer than the last one."""
    live: Run = await run(seed=2)
    system = live.prompt(6)

    async def talk() -> None:
        tokens = [*system, *live.prompt(2)]
        for _ in range(5):
            await live.warm(tokens)  # what a worker has not told yet is no fault
            tokens = [*tokens, *live.prompt(1)]

    await asyncio.gather(*(talk() for _ in range(8)))
    await eventually(lambda: live.served.inflight() == 0)
    totals = (await ask(live.served.admin, "/admin/report")).json["totals"]
    assert totals["requests"] == 40
    assert totals["delivered"] > totals["prompt"] // 2
    wrong = totals["stale_index"] + totals["token_mismatch"] + totals["gained"]
    assert wrong / totals["prompt"] < 0.005, totals
    assert totals["unreported"] == totals["isolation"] == 0


async def test_a_list_of_prompts_is_accounted_for_as_a_whole(run: Callable[..., Any]) -> None:
    """What is predicted and what is delivered are of all its prompts, not of the first one."""
    live: Run = await run(seed=3)
    prompts = [live.prompt(5), live.prompt(3)[:40], live.prompt(7)]
    matchable = (5 + 2 + 7) * 16
    body = {"model": "fake", "prompt": prompts, "max_tokens": 1, "temperature": 0}
    known = live.served.gateway.prompts
    await eventually(lambda: known.missing(live.router.profile("fake")) is None)
    cold = await ask(live.served.url, "/v1/completions", body)
    holder = cold.header("x-headwater-worker")
    assert holder is not None
    for prompt in prompts:
        await live.known(prompt, holder)
    warm = await ask(live.served.url, "/v1/completions", body)
    assert warm.header("x-headwater-worker") == holder
    assert warm.header("x-headwater-prompt-tokens") == str(sum(map(len, prompts)))
    assert warm.header("x-headwater-matched-tokens") == str(matchable)
    assert warm.json["usage"]["prompt_tokens_details"]["cached_tokens"] == matchable
    told = (await ask(live.served.admin, "/admin/index/who", body)).json
    assert [told["matchable_tokens"], told["holders"][0]["tokens"]] == [matchable, matchable]
    await eventually(lambda: live.served.inflight() == 0)
    totals = (await ask(live.served.admin, "/admin/report")).json["totals"]
    assert {name: totals[name] for name in ("prompt", "tail", "cold", "captured", "delivered")} == {
        "prompt": 2 * sum(map(len, prompts)),
        "tail": 2 * (1 + 8 + 1),
        "cold": matchable,
        "captured": matchable,
        "delivered": matchable,
    }
    assert not any(totals[name] for name in LOSSES)
