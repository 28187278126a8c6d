"""Random load with faults on a real engine and a tiny model: nothing may leak, stall or be wrong.

    python -P bench/storm.py --minutes 30 [--seed 1] [--json storm.json]

Clients ask for prompts that share prefixes, greedily or with seeds, with stop strings, several
choices, priorities, deadlines, adapters and scores of prompts; they leave at any time. Meanwhile
an adapter comes and goes, the cache is flushed and steps are lost. Some settings have a host tier,
which stays open whether it pays or not. Pools are too small, one kind after the other. The
scheduler's invariants are checked after every step, and each answer is compared with the one that
an engine without a cache gives when it has nothing else to do; the part of an answer that came
before its end must be the start of it.
Ends with status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.storm_engine import Alone, UnreliableRunner, joined, scheduler_of, text_of
from bench.storm_load import SETTINGS, AdapterFolder, Load, Setting, tiny_adapters, tiny_model
from shared.errors import DeadlineExceeded
from shared.events import BlocksRemoved, CacheEvent
from worker.adapters import Adapters
from worker.detokenise import Detokenizer
from worker.engine import Delta, Engine, GenerationRequest
from worker.model.weights import describe
from worker.sequence import FinishReason

STALL_S = 20.0
"""Nothing happens for so long although requests are open: a stall."""


@dataclass
class Tally:
    """What happened, and what must not."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if len(self.faults) < 20:
            self.faults.append(f"{kind}: {what}")


class Storm:
    """One setting, from start to idle."""

    def __init__(
        self,
        setting: Setting,
        model: torch.nn.Module,
        folders: tuple[AdapterFolder, ...],
        alone: Alone,
        tally: Tally,
        seed: int,
    ) -> None:
        self.setting, self.alone, self.tally = setting, alone, tally
        self.rng = random.Random(f"{seed} {setting.name}")
        self.load = Load(self.rng, setting)
        self.runner = UnreliableRunner(
            describe(model), setting.n_blocks, setting.block_size, threads=1
        )
        self.runner.rng, self.runner.odds = self.rng, 0.001
        self.runner.use_host_memory(setting.host_blocks)
        self.runner.adapters.survey(self.runner.logits, setting.n_blocks * setting.block_size)
        self.scheduler = scheduler_of(setting)
        self.engine = Engine(
            self.runner,
            self.scheduler,
            lambda tokens: Detokenizer(text_of, tokens),
            time.monotonic,
            self._events,
        )
        self.folders = folders
        self.adapters = Adapters(
            self.runner.adapters, self.engine, taken=(), limit=len(folders), wall=time.time
        )
        self.answers: list[tuple[GenerationRequest, list[Delta]]] = []
        self.moved = time.monotonic()
        self.open = 0

    def _events(self, events: list[CacheEvent]) -> None:
        self.tally.counts["evictions"] += sum(
            len(event.keys) for event in events if isinstance(event, BlocksRemoved)
        )

    async def run(self, seconds: float, turns: int) -> None:
        """The load for so long, and so many requests of each client; then until all is quiet."""
        self.engine.start()
        for each in self.folders:
            await self.adapters.load(each.name, each.folder)
        end = time.monotonic() + seconds
        names = map(str, range(self.setting.clients))
        clients = [asyncio.create_task(self._client(name, end, turns)) for name in names]
        others = [
            asyncio.create_task(each)
            for each in (self._flush(), self._swap_adapter(), self._watch(clients))
        ]
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, Exception):
                self.tally.fault("errors", repr(result))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._end()
        for request, deltas in self.answers:
            self._compare(request, deltas)

    async def _client(self, name: str, end: float, turns: int) -> None:
        turn = 0
        while turn < turns or time.monotonic() < end:
            turn += 1
            served = {each.info.scope: each for each in self.adapters.served()}
            requests = self.load.draw(f"{name}-{turn}", list(served))
            with self.adapters.using(served.get(requests[0].adapter)):
                await asyncio.gather(*(self._ask(each) for each in requests))

    async def _ask(self, request: GenerationRequest) -> None:
        """One answer; one in five clients leaves, at a random token or at a random time."""
        rng, counts = self.rng, self.tally.counts
        deltas: list[Delta] = []
        leaves = rng.random() < 0.2
        most = rng.randint(0, 20) if leaves and rng.random() < 0.5 else 10_000
        patience = rng.expovariate(5.0) if leaves and most == 10_000 else None
        counts["requests"] += 1
        self.open += 1
        try:
            async with asyncio.timeout(patience):
                stream = self.engine.generate(request)
                try:
                    async for delta in stream:
                        self.moved = time.monotonic()
                        deltas.append(delta)
                        if len(deltas) > most:
                            break
                finally:
                    await stream.aclose()  # type: ignore[attr-defined]
        except TimeoutError:
            pass
        except DeadlineExceeded:
            counts["deadlines"] += 1
        finally:
            self.open -= 1
        counts["aborts"] += leaves and (not deltas or deltas[-1].finish is None)
        counts["tokens"] += sum(len(delta.token_ids) for delta in deltas)
        self.answers.append((request, deltas))

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(0.7))
            await self.engine.flush_cache()
            self.tally.counts["flushes"] += 1

    async def _swap_adapter(self) -> None:
        """The last adapter leaves while its requests run, and comes back."""
        last = self.folders[-1]
        while True:
            await asyncio.sleep(self.rng.expovariate(2.0))
            await self.adapters.unload(last.name)
            await asyncio.sleep(self.rng.expovariate(2.0))
            await self.adapters.load(last.name, last.folder)
            self.tally.counts["adapters loaded"] += 1

    async def _watch(self, clients: list[asyncio.Task[None]]) -> None:
        """Ends a stalled storm."""
        while True:
            await asyncio.sleep(1.0)
            crashed = not self.engine.alive
            if crashed or (self.open and time.monotonic() - self.moved > STALL_S):
                self.tally.fault("crashes" if crashed else "stalls", repr(self.engine.load()))
                for task in clients:
                    task.cancel()
                return

    async def _end(self) -> None:
        """Everything is given back."""
        counts, pool = self.tally.counts, self.scheduler.pool
        for _ in range(200):
            if not self.engine.alive or await self.engine.call(lambda: self.scheduler.idle):
                break
            await asyncio.sleep(0.02)
        await self.engine.stop()
        load = self.scheduler.load()
        if (load.running, load.waiting, load.blocks_used) != (0, 0, 0):
            self.tally.fault("leaks", repr(load))
        if pool.available != pool.n_blocks:
            self.tally.fault("leaks", repr(pool))
        if any(adapter.requests or adapter.leaving for adapter in self.adapters):
            self.tally.fault("leaks", "an adapter is still in use")
        self.scheduler.check()
        stats = self.engine.stats()
        counts["preemptions"] += stats.preemptions
        counts["cached tokens"] += stats.prefill_cached_tokens
        counts["host tokens"] += stats.host_tokens
        counts["steps"] += sum(stats.steps.values())
        counts["lost steps"] += self.runner.lost

    def _compare(self, request: GenerationRequest, deltas: list[Delta]) -> None:
        got, right, counts = joined(deltas), self.alone.answer(request), self.tally.counts
        name = f"{self.setting.name}, {request.id} {request.adapter}, {request.params}"
        if got.tokens:
            counts["scored"] += len(right.scores)
            if not got.same_scores(right):
                self.tally.fault("wrong", f"{name}: {got.scores} instead of {right.scores}")
        if got.finish in (FinishReason.STOP, FinishReason.LENGTH):
            counts["compared"] += 1
            counts["of adapters"] += bool(request.adapter)
            if (got.text, got.tokens, got.finish) != (right.text, right.tokens, right.finish):
                self.tally.fault("wrong", f"{name}: {got.tokens} instead of {right.tokens}")
            return
        began = right.tokens[: len(got.tokens)], right.text.startswith(got.text[:-1])
        if (got.tokens, True) != began:
            self.tally.fault("wrong", f"{name}: began with {got.tokens} instead of {right.tokens}")
        if got.finish is FinishReason.ERROR:
            self.tally.counts["lost with a step"] += 1
            if not self.runner.lost:
                self.tally.fault("errors", f"{name}: {deltas[-1].error}")


FAULTS = ("wrong", "leaks", "stalls", "crashes", "errors")
SHOWN = (
    "requests", "compared", "of adapters", "scored", "tokens", "cached tokens", "host tokens",
    "steps", "aborts", "deadlines", "adapters loaded",
    "preemptions", "evictions", "flushes", "lost steps", "lost with a step", *FAULTS,
)  # fmt: skip


def storm(
    seconds: float,
    seed: int,
    tell: Callable[[str], None],
    settings: tuple[Setting, ...] = SETTINGS,
    turns: int = 1,
) -> Tally:
    """All settings, an equal share of the time each. A fault does not stop the others.

    :param turns: each client asks at least so often, however slow the machine is.
    """
    # steps are lost on purpose: no traceback for each
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    torch.set_num_threads(1)
    model = tiny_model(torch.float64)
    tally = Tally()
    with tempfile.TemporaryDirectory() as place:
        adapters = tiny_adapters(model, Path(place))
        alone = Alone(model, adapters)
        for setting in settings:
            started = tally.counts.copy()
            made = Storm(setting, model, adapters, alone, tally, seed)
            try:
                asyncio.run(made.run(seconds / len(settings), turns))
            except AssertionError as error:
                tally.fault("leaks", f"{setting.name}: {error}")
            tell(f"{setting.name}: " + line(tally.counts - started))
    return tally


def line(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]:,} {name}" for name in SHOWN)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random load with faults on a real engine.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="file for the counts")
    args = parser.parse_args()
    tally = storm(60 * args.minutes, args.seed, print)
    print("total: " + line(tally.counts))
    for fault in tally.faults:
        print(f"FAULT {fault}", file=sys.stderr)
    if args.json:
        report = {name: tally.counts[name] for name in SHOWN} | {"faults": tally.faults}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
