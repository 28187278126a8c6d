"""Random load with faults on a real engine and a tiny model: nothing may leak, stall or be wrong.

    python -P bench/storm.py --minutes 30 [--seed 1] [--json storm.json]

Clients ask for prompts that share prefixes, greedily or with seeds, with stop strings, several
choices, priorities and deadlines; they leave at any time. Meanwhile the cache is flushed and steps
are lost. Pools are too small, one kind after the other. The scheduler's invariants are checked
after every step, and each answer is compared with the one that an engine without a cache gives when
it has nothing else to do; the part of an answer that came before its end must be the start of it.
Ends with status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog
import torch
import transformers

from shared.errors import DeadlineExceeded
from shared.events import BlocksRemoved, CacheEvent
from shared.paging import BlockPool
from worker.detokenise import Detokenizer
from worker.engine import Delta, Engine, GenerationRequest
from worker.model.runner import TorchRunner
from worker.model.weights import describe
from worker.outcome import TokenOut
from worker.runner import RunnerError, StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams
from worker.steploop import StepLoop

VOCAB, EOS, MAX_LEN = 259, 257, 2048
LONGEST_ANSWER = 120
STALL_S = 20.0
"""Nothing happens for so long although requests are open: a stall."""
ROOTS = (b"a" * 16, b"b" * 16)
"""Two tenants, who must share nothing; the tokens of both are the same."""


@dataclass(frozen=True)
class Setting:
    """One engine under test."""

    name: str
    n_blocks: int
    block_size: int
    budget: int
    max_running: int
    clients: int
    max_step_ms: float = 0.0
    longest: int = 300
    """Longest prompt."""
    prompts: int = 30


SETTINGS = (
    Setting("forty blocks", 40, 16, 64, 24, 24),
    Setting("odd block size", 130, 5, 96, 24, 24),
    Setting("small budget, time budget", 40, 16, 16, 8, 12, max_step_ms=5.0),
    Setting("roomy", 400, 16, 512, 32, 32, max_step_ms=30.0, longest=900),
    Setting("blocks of one token", 500, 1, 48, 16, 16),
    Setting("nearly no room", 12, 16, 40, 6, 10, longest=150),
)


@dataclass
class Tally:
    """What happened, and what must not."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if len(self.faults) < 20:
            self.faults.append(f"{kind}: {what}")


def tiny_model(dtype: torch.dtype) -> torch.nn.Module:
    """A Llama whose greedy answers vary and depend on all of the prompt."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=MAX_LEN, hidden_size=48, intermediate_size=80,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=False, eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" in name:
                weight.normal_()
            elif weight.dim() > 1:
                gain = 2.5 if "q_proj" in name or "k_proj" in name else 1.5
                weight.normal_(std=gain * weight.shape[-1] ** -0.5)
    return model.eval()


class CheckedScheduler(Scheduler):
    """Proves its invariants before and after each step."""

    def plan(self) -> StepPlan | None:
        self.check()
        return super().plan()

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenOut]:
        outs = super().commit(plan, result)
        self.check()
        return outs


class UnreliableRunner(TorchRunner):
    """Loses a step now and then, after it has written its KV."""

    odds = 0.0
    rng = random.Random(0)
    lost = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if self.rng.random() < self.odds:
            self.lost += 1
            raise RunnerError("lost on purpose")
        return result


def text_of(ids: list[int] | tuple[int, ...]) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def scheduler_of(setting: Setting, *, caching: bool = True, checked: bool = True) -> Scheduler:
    pool = BlockPool(setting.n_blocks, setting.block_size, caching=caching)
    return (CheckedScheduler if checked else Scheduler)(
        pool,
        max_batch_tokens=setting.budget,
        max_running=setting.max_running,
        max_model_len=MAX_LEN,
        eos_token_ids=frozenset({EOS}),
        max_waiting=10_000,
        max_step_ms=setting.max_step_ms,
    )


class Alone:
    """Right answers: no cache, no neighbours, the whole prompt in one step."""

    def __init__(self, model: torch.nn.Module) -> None:
        setting = Setting("alone", 160, 16, 8192, 1, 1)
        runner = TorchRunner(describe(model), setting.n_blocks, setting.block_size, threads=1)
        self._deltas: list[Delta] = []
        self._loop: StepLoop[None] = StepLoop(
            runner,
            scheduler_of(setting, caching=False, checked=False),
            lambda tokens: Detokenizer(text_of, tokens),
            time.monotonic,
            lambda _: None,
            lambda outgoing: self._deltas.extend(item for _, item in outgoing),  # type: ignore[misc]
        )
        self._known: dict[object, tuple[str, list[int], FinishReason | None]] = {}

    def answer(
        self, tokens: tuple[int, ...], params: SamplingParams
    ) -> tuple[str, list[int], FinishReason | None]:
        key = (tokens, repr(params))
        if key not in self._known:
            self._deltas.clear()
            self._loop.accept(GenerationRequest("alone", tokens, params, ROOTS[0]), None)
            while self._loop.step():
                pass
            self._known[key] = joined(self._deltas)
        return self._known[key]


def joined(deltas: list[Delta]) -> tuple[str, list[int], FinishReason | None]:
    """Text, tokens and end of an answer, or of the part that came."""
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.token_ids]
    return text, tokens, deltas[-1].finish if deltas else None


class Load:
    """Draws requests. Others may add kinds: a method that returns a request with a new property."""

    def __init__(self, rng: random.Random, setting: Setting) -> None:
        self.rng = rng
        longest = min(setting.longest, setting.n_blocks * setting.block_size - LONGEST_ANSWER)
        self.prompts = [self._fresh(rng.randint(1, longest))]
        while len(self.prompts) < setting.prompts:
            start = rng.choice(self.prompts)[: rng.randint(0, longest)]
            start = start if rng.random() < 0.6 else ()
            length = rng.randint(1, longest)
            self.prompts.append((start + self._fresh(length))[:length])
        self.params = [
            SamplingParams(max_tokens=1, temperature=0.0),
            SamplingParams(max_tokens=12, temperature=0.0),
            SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=30, temperature=0.0, stop=("e", "th", "\n"), min_tokens=2),
            SamplingParams(max_tokens=20, temperature=0.8, seed=5, presence_penalty=0.5),
            SamplingParams(max_tokens=25, temperature=1.1, seed=42, top_p=0.9, top_k=40),
        ]

    def _fresh(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(97, 123), k=length))

    def draw(self, name: str) -> list[GenerationRequest]:
        """A request with one to three choices."""
        rng = self.rng
        params = rng.choice(self.params)
        deadline = time.monotonic() + rng.expovariate(1.0) if rng.random() < 0.15 else None
        request = GenerationRequest(
            name, rng.choice(self.prompts), params, rng.choice(ROOTS),
            priority=rng.choice([0, 0, 0, 1, 2]), deadline=deadline,
        )  # fmt: skip
        if params.seed is None:
            return [request]
        return [
            replace(request, id=f"{name}.{n}", params=replace(params, seed=params.seed + n))
            for n in range(rng.randint(1, 3))
        ]


class Storm:
    """One setting, from start to idle."""

    def __init__(
        self, setting: Setting, model: torch.nn.Module, alone: Alone, tally: Tally, seed: int
    ) -> None:
        self.setting, self.alone, self.tally = setting, alone, tally
        self.rng = random.Random(f"{seed} {setting.name}")
        self.load = Load(self.rng, setting)
        self.runner = UnreliableRunner(
            describe(model), setting.n_blocks, setting.block_size, threads=1
        )
        self.runner.rng, self.runner.odds = self.rng, 0.001
        self.scheduler = scheduler_of(setting)
        self.engine = Engine(
            self.runner,
            self.scheduler,
            lambda tokens: Detokenizer(text_of, tokens),
            time.monotonic,
            self._events,
        )
        self.answers: list[tuple[GenerationRequest, list[Delta]]] = []
        self.moved = time.monotonic()
        self.open = 0

    def _events(self, events: list[CacheEvent]) -> None:
        self.tally.counts["evictions"] += sum(
            len(event.keys) for event in events if isinstance(event, BlocksRemoved)
        )

    async def run(self, seconds: float) -> None:
        """The load for so long, then until all is quiet."""
        self.engine.start()
        end = time.monotonic() + seconds
        names = map(str, range(self.setting.clients))
        clients = [asyncio.create_task(self._client(name, end)) for name in names]
        others = [asyncio.create_task(self._flush()), asyncio.create_task(self._watch(clients))]
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, Exception):
                self.tally.fault("errors", repr(result))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._end()
        for request, deltas in self.answers:
            self._compare(request, deltas)

    async def _client(self, name: str, end: float) -> None:
        turn = 0
        while time.monotonic() < end:
            turn += 1
            requests = self.load.draw(f"{name}-{turn}")
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
        self.scheduler.check()
        stats = self.engine.stats()
        counts["preemptions"] += stats.preemptions
        counts["cached tokens"] += stats.prefill_cached_tokens
        counts["steps"] += sum(stats.steps.values())
        counts["lost steps"] += self.runner.lost

    def _compare(self, request: GenerationRequest, deltas: list[Delta]) -> None:
        text, tokens, finish = joined(deltas)
        right_text, right_tokens, right_finish = self.alone.answer(
            tuple(request.prompt_tokens), request.params
        )
        name = f"{self.setting.name}, {request.id}, {request.params}"
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.tally.counts["compared"] += 1
            if (text, tokens, finish) != (right_text, right_tokens, right_finish):
                self.tally.fault("wrong", f"{name}: {tokens} instead of {right_tokens}")
            return
        if tokens != right_tokens[: len(tokens)] or not right_text.startswith(text[:-1]):
            self.tally.fault("wrong", f"{name}: began with {tokens} instead of {right_tokens}")
        if finish is FinishReason.ERROR:
            self.tally.counts["lost with a step"] += 1
            if not self.runner.lost:
                self.tally.fault("errors", f"{name}: {deltas[-1].error}")


FAULTS = ("wrong", "leaks", "stalls", "crashes", "errors")
SHOWN = (
    "requests", "compared", "tokens", "cached tokens", "steps", "aborts", "deadlines",
    "preemptions", "evictions", "flushes", "lost steps", "lost with a step", *FAULTS,
)  # fmt: skip


def storm(
    seconds: float, seed: int, tell: Callable[[str], None], settings: tuple[Setting, ...] = SETTINGS
) -> Tally:
    """All settings, an equal share of the time each. A fault does not stop the others."""
    torch.set_num_threads(1)
    model = tiny_model(torch.float64)
    alone = Alone(model)
    tally = Tally()
    for setting in settings:
        started = tally.counts.copy()
        try:
            asyncio.run(Storm(setting, model, alone, tally, seed).run(seconds / len(settings)))
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
    # steps are lost on purpose: no traceback for each
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
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
