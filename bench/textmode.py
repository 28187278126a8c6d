"""Learned routing without a tokenizer, in virtual time: the live benchmark without its noise.

    python -P bench/textmode.py                     three loads, three seeds (about half a minute)
    python -P bench/textmode.py --mode exact        the same with cache events and tokens

Conversations over a few shared system prompts arrive at workers that cache blocks of 64 bytes,
LRU, and prefill one request at a time. They tell neither tokenizer nor capacity nor load: all that
the router learns is ``cached_tokens`` of its own requests. Beside it, as bounds: one worker with
endless memory (hit rate), and a rule that sees every cache and queue (time to first token).
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.config import RoutingConfig
from gateway.decision import AttemptEnd, Route
from gateway.index.table import PrefixTable
from gateway.records import Outcome
from gateway.router import Lease, Router
from gateway.routing.base import Query, Trust
from gateway.routing.catalogue import make_policies
from shared.blocks import Scope, extend_chain
from shared.events import CacheEvent, EventBatch, Snapshot, removed, stored
from shared.load import WorkerInfo
from shared.openai import Usage
from shared.types import BlockKey, Epoch, RequestId, WorkerId

BYTES_PER_TOKEN, BLOCK = 4, 16
PREFILL_S, DECODE_S = 150e-6, 1e-3
WORKERS, GROUPS, CONVERSATIONS, TURNS, SYSTEM_TOKENS = 4, 8, 20, 6, 2000
LOADS = {"uniform": (0.0, 4.0, 1200), "zipf": (1.2, 4.0, 1200), "hot": (1.2, 16.0, 2400)}
"""Name -> exponent of the groups' popularity, conversations per second, blocks per worker."""
WORDS = (
    "alpha bravo river stone cloud green query table model token cache route light paper".split()
)
ROOT = Scope("m", "text").root(b"")


@dataclass(slots=True)
class Turn:
    user: str
    output: int
    think_s: float


@dataclass(slots=True)
class Conversation:
    at: float
    turns: list[Turn]
    history: list[tuple[str, str]]

    def prompt(self) -> bytes:
        """As the worker sees it, with its template."""
        return "".join(f"<|{r}|>{t}" for r, t in self.history).encode() + b"<|assistant|>"

    def text(self) -> bytes:
        """As the gateway sees it, which knows no template."""
        return "".join(f"{r}\n{t}\n" for r, t in self.history).encode()


def conversations(seed: int, zipf: float, rate: float) -> list[Conversation]:
    """The workload; drawn anew for each run, since a run writes answers into it."""
    rng = Random(seed)

    def words(size: int) -> str:
        return " ".join(
            f"{rng.choice(WORDS)}{rng.getrandbits(12):x}" for _ in range(size // 5 + 1)
        )[:size]

    systems = [f"You are assistant {n}. {words(4 * SYSTEM_TOKENS)}" for n in range(GROUPS)]
    weights = [1 / (n + 1) ** zipf for n in range(GROUPS)]
    groups = rng.choices(range(GROUPS), weights, k=GROUPS * CONVERSATIONS)
    now, made = 0.0, []
    for group in groups:
        now += rng.expovariate(rate)
        turns = [
            Turn(words(4 * rng.randint(40, 160)), rng.randint(60, 140), rng.expovariate(1.0))
            for _ in range(TURNS)
        ]
        made.append(Conversation(now, turns, [("system", systems[group])]))
    return made


class Worker:
    """Cached blocks, least recently used first, and the end of what it has to prefill."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._cache: OrderedDict[BlockKey, None] = OrderedDict()
        self.busy_until = 0.0

    def depth(self, blocks: list[BlockKey]) -> int:
        """Leading blocks that are cached."""
        return next((n for n, block in enumerate(blocks) if block not in self._cache), len(blocks))

    def insert(self, blocks: list[BlockKey]) -> None:
        """Touch them, the end of a prompt first: it goes first."""
        for block in reversed(blocks):
            self._cache[block] = None
            self._cache.move_to_end(block)
        while self._most and len(self._cache) > self._most:
            self._cache.popitem(last=False)


@dataclass(slots=True)
class Ask:
    """A request at the moment of its arrival."""

    name: str
    now: float
    output: int
    text: bytes
    blocks: list[BlockKey]
    tokens: int


Choice = tuple[int, Lease | None]
Chooser = Callable[[Ask, list[Worker]], Choice]


def least_ttft(ask: Ask, workers: list[Worker]) -> Choice:
    """The rule that sees everything."""

    def cost(at: int) -> tuple[float, float, int]:
        worker = workers[at]
        left = ask.tokens - min(worker.depth(ask.blocks) * BLOCK, ask.tokens - 1)
        wait = max(0.0, worker.busy_until - ask.now)
        return wait + left * PREFILL_S, worker.busy_until, at

    return min(range(len(workers)), key=cost), None


class Routed:
    """Our router, told what a gateway would be told."""

    def __init__(self, exact: bool, blocks: int, seed: int) -> None:
        config = RoutingConfig()
        self._exact = exact
        self._index = PrefixTable(config.index_max_blocks, Random(seed))
        self.router = Router(self._index, make_policies(config), config, Random(seed))
        self._names = [WorkerId(f"w{n}") for n in range(WORKERS)]
        self._seqs = dict.fromkeys(self._names, 0)
        self.error = self.tokens = 0
        for name in self._names:
            told = blocks if exact else 0
            info = WorkerInfo(
                id=name, epoch=Epoch(1), url="", models=("m",), event_feed=exact, blocks_total=told
            )
            self.router.join(info, 0.0)
            if exact:
                self._feed(name, Snapshot(b""), 0.0)
                self.router.set_trust(name, Trust.EXACT, "events flow", 0.0)

    def __call__(self, ask: Ask, workers: list[Worker]) -> Choice:
        keys = ask.blocks if self._exact else extend_chain(ROOT, ask.text)[0]
        if self._exact:
            self._follow(keys, workers, ask.now)
        query = Query(
            request_id=RequestId(ask.name),
            model="m",
            prompt_tokens=ask.tokens if self._exact else 0,
            max_tokens=ask.output,
            arrived=ask.now,
            keys=keys,
        )
        route = self.router.decide(query, ask.now)
        assert isinstance(route, Route)
        at = self._names.index(route.worker)
        hit = min(workers[at].depth(ask.blocks) * BLOCK, ask.tokens - 1)
        self.error += abs(hit - route.matched_tokens)
        self.tokens += ask.tokens
        return at, self.router.begin(route, ask.now, attempt=1)

    def _follow(self, keys: list[BlockKey], workers: list[Worker], now: float) -> None:
        known = self._index.match(keys)
        for name, worker in zip(self._names, workers, strict=True):
            match, after = known.get(name), worker.depth(keys)
            before = 0 if match is None else match.tokens // BLOCK
            if after > before:
                self._feed(name, stored([int(key) for key in keys[before:after]], None), now)
            elif after < before:
                self._feed(name, removed([int(key) for key in keys[after:before]]), now)

    def _feed(self, name: WorkerId, event: CacheEvent, now: float) -> None:
        self._seqs[name] += 1
        batch = EventBatch(name, Epoch(1), "worker", self._seqs[name], now, 1, (event,))
        assert self.router.apply_events(batch, now).ok


@dataclass(slots=True)
class Result:
    ttft_s: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0

    @property
    def hit(self) -> float:
        return self.cached / self.prompt


class Run:
    """One workload over some workers, in virtual time."""

    def __init__(self, work: list[Conversation], workers: list[Worker], choose: Chooser) -> None:
        self._work, self._workers, self._choose = work, workers, choose
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order: Iterator[int] = count()
        self.result = Result()

    def __call__(self) -> Result:
        for number, one in enumerate(self._work):
            self._at(one.at, partial(self._arrive, number, 0))
        while self._heap:
            now, _, happen = heapq.heappop(self._heap)
            happen(now)
        return self.result

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), happen))

    def _arrive(self, number: int, turn: int, now: float) -> None:
        talk = self._work[number]
        step = talk.turns[turn]
        talk.history.append(("user", step.user))
        prompt = talk.prompt()
        tokens = len(prompt) // BYTES_PER_TOKEN
        ask = Ask(f"{number}-{turn}", now, step.output, talk.text(), _blocks(prompt), tokens)
        at, lease = self._choose(ask, self._workers)
        worker = self._workers[at]
        cached = min(worker.depth(ask.blocks) * BLOCK, tokens - 1)
        worker.insert(ask.blocks)
        worker.busy_until = max(now, worker.busy_until) + (tokens - cached) * PREFILL_S
        first = worker.busy_until
        self.result.ttft_s.append(first - now)
        self.result.prompt += tokens
        self.result.cached += cached
        if lease is not None:
            self._at(first, lease.first_token)
        answer = "".join(
            f"{Random(f'{number} {turn} {n}').getrandbits(12):03x} " for n in range(step.output)
        )

        def end(then: float) -> None:
            worker.insert(_blocks(prompt + answer.encode()))
            if lease is not None:
                usage = Usage(tokens, step.output, cached)
                itl_s = (then - first) / step.output
                lease.finish(
                    AttemptEnd(
                        outcome=Outcome.OK, status=200, usage=usage, itl_s=itl_s, wall_at=then
                    ),
                    then,
                )
            talk.history.append(("assistant", answer))
            if turn + 1 < len(talk.turns):
                self._at(then + step.think_s, partial(self._arrive, number, turn + 1))

        self._at(first + step.output * DECODE_S, end)


def _blocks(data: bytes) -> list[BlockKey]:
    return extend_chain(b"\0" * 16, data)[0]


def compare(load: str, seed: int, mode: str) -> dict[str, Any]:
    """One row: ours against the two bounds."""
    zipf, rate, blocks = LOADS[load]

    def fresh() -> list[Conversation]:
        return conversations(seed, zipf, rate)

    endless = Run(fresh(), [Worker(0)], lambda ask, workers: (0, None))()
    seeing = Run(fresh(), [Worker(blocks) for _ in range(WORKERS)], least_ttft)()
    routed = Routed(mode == "exact", blocks, seed)
    ours = Run(fresh(), [Worker(blocks) for _ in range(WORKERS)], routed)()
    return {
        "load": load,
        "seed": seed,
        "mode": mode,
        "hit_of_endless": round(ours.hit / endless.hit, 4),
        "seeing_hit_of_endless": round(seeing.hit / endless.hit, 4),
        "ttft_of_seeing": round(mean(ours.ttft_s) / mean(seeing.ttft_s), 3),
        "ttft_ms": round(mean(ours.ttft_s) * 1e3, 1),
        "p99_ms": round(sorted(ours.ttft_s)[int(0.99 * len(ours.ttft_s))] * 1e3, 1),
        "prediction_error": round(routed.error / routed.tokens, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=("learned", "exact"), default="learned")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--seeds", default="1,2,3")
    told = parser.parse_args()
    for load in told.loads.split(","):
        for seed in told.seeds.split(","):
            print(json.dumps(compare(load, int(seed), told.mode)), flush=True)


if __name__ == "__main__":
    main()
