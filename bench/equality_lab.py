"""What ``bench/equality.py`` is made of: reference cases, a runner that compares, scenarios."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from shared.events import BlocksRemoved
from shared.paging import BlockPool
from worker import sequence as seqs
from worker.model.runner import TorchRunner
from worker.model.weights import LoadedModel
from worker.runner import StepPlan
from worker.scheduler import Scheduler

SCOPE = bytes(16)
RUNNER_TOKENS = 12_000


@dataclass(frozen=True)
class Case:
    """A prompt and what ``generate()`` makes of it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Tensor
    """``[new, vocabulary]``"""

    def margin(self, step: int) -> float:
        """How far the best logit is ahead of the second."""
        best = self.logits[step].topk(2).values
        return float(best[0] - best[1])


@dataclass
class Tally:
    """What was seen so far."""

    cases: int = 0
    by_scenario: dict[str, int] = field(default_factory=dict)
    divergences: list[dict[str, Any]] = field(default_factory=list)
    worst_logits: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    gathers: int = 0
    views: int = 0


class RecordingRunner(TorchRunner):
    """Compares the logits of every step on the way, as long as the tokens agree."""

    references: dict[str, Case]
    worst = 0.0

    def logits(self, plan: StepPlan) -> Tensor:
        """As the base class."""
        rows = super().logits(plan)
        for row, chunk in zip(rows, (c for c in plan.chunks if c.sample), strict=True):
            case = self.references.get(chunk.seq_id)
            if case is None:
                continue
            step = chunk.start + len(chunk.tokens) - len(case.prompt)
            agreed = case.tokens[step - 1 : step] == chunk.tokens[-1:] if step else True
            if not agreed:
                del self.references[chunk.seq_id]
                continue
            theirs = case.logits[step]
            self.worst = max(self.worst, float((row - theirs).abs().max() / theirs.abs().max()))
        return rows


class Lab:
    """Runs scenarios on one loaded model and judges their answers."""

    def __init__(self, loaded: LoadedModel, threads: int, margin: float) -> None:
        self._loaded, self._threads, self._margin = loaded, threads, margin
        self._names = itertools.count()
        self._runners: dict[int, RecordingRunner] = {}
        self.tally = Tally()

    def runner(self, block_size: int) -> RecordingRunner:
        """The runner with this block size."""
        if block_size not in self._runners:
            n_blocks = RUNNER_TOKENS // block_size
            made = RecordingRunner(self._loaded, n_blocks, block_size, threads=self._threads)
            made.references = {}
            self._runners[block_size] = made
        return self._runners[block_size]

    def scheduler(
        self, runner: RecordingRunner, *, budget: int, running: int, blocks: int, caching: bool
    ) -> Scheduler:
        """A scheduler over a fresh pool of the first ``blocks`` blocks."""
        return Scheduler(
            BlockPool(blocks, runner.block_size, caching=caching),
            max_batch_tokens=budget,
            max_running=running,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            max_waiting=10_000,
        )

    def answer(
        self, runner: RecordingRunner, scheduler: Scheduler, cases: Iterable[Case]
    ) -> list[seqs.Sequence]:
        """All cases at once, to their ends."""
        asked: list[seqs.Sequence] = []
        for case in cases:
            name = str(next(self._names))
            params = seqs.SamplingParams(
                max_tokens=len(case.tokens), temperature=0, ignore_eos=True
            )
            prompt = list(case.prompt)
            made = seqs.Sequence(name, prompt, len(prompt), params, SCOPE, arrived=0.0)
            runner.references[name] = case
            scheduler.add(made)
            asked.append(made)
        for step in itertools.count():
            plan = scheduler.plan()
            if plan is None:
                break
            scheduler.commit(plan, runner.run(plan))
            if step % 20 == 0:
                scheduler.check()
        scheduler.check()
        self._count(scheduler, asked)
        return asked

    def _count(self, scheduler: Scheduler, asked: Sequence[seqs.Sequence]) -> None:
        events = scheduler.pool.drain_events()
        self.tally.evicted_blocks += sum(
            len(event.keys) for event in events if isinstance(event, BlocksRemoved)
        )
        self.tally.cached_tokens += sum(made.cached or 0 for made in asked)
        self.tally.preemptions += sum(made.preemptions for made in asked)

    def judge(self, scenario: str, case: Case, made: seqs.Sequence) -> None:
        """Enter one finished answer."""
        tally = self.tally
        tally.cases += 1
        tally.by_scenario[scenario] = tally.by_scenario.get(scenario, 0) + 1
        ours = tuple(made.tokens[made.prompt_len :])
        if ours == case.tokens:
            return
        step = next(i for i, (a, b) in enumerate(zip(ours, case.tokens, strict=True)) if a != b)
        margin = case.margin(step)
        tally.divergences.append(
            {
                "scenario": scenario,
                "prompt_tokens": len(case.prompt),
                "step": step,
                "margin": round(margin, 6),
                "near_tie": margin < self._margin,
            }
        )

    def close(self) -> Tally:
        """The sums over all runners."""
        for runner in self._runners.values():
            self.tally.worst_logits = max(self.tally.worst_logits, runner.worst)
            self.tally.views += runner.counts.views
            self.tally.gathers += runner.counts.gathers
        return self.tally

    # ---- scenarios ----

    def chunked(self, name: str, cases: Iterable[Case], budget: int, block_size: int) -> None:
        """One after the other, nothing cached, at most ``budget`` tokens a step."""
        runner = self.runner(block_size)
        for case in cases:
            scheduler = self.scheduler(
                runner, budget=budget, running=1, blocks=runner.n_blocks, caching=False
            )
            self.judge(name, case, self.answer(runner, scheduler, [case])[0])

    def warm(self, name: str, cases: Iterable[Case], block_size: int, rng: Random) -> None:
        """Behind a request that shares a prefix of random length and goes on otherwise."""
        runner = self.runner(block_size)
        for case in cases:
            scheduler = self.scheduler(
                runner, budget=256, running=4, blocks=runner.n_blocks, caching=True
            )
            split = rng.randrange(1, len(case.prompt) + 1)
            other = tuple(rng.randrange(17, 40_000) for _ in range(rng.randrange(0, 12)))
            before = Case(case.prompt[:split] + other, (0,), case.logits[:1])
            runner.references.clear()
            self._warm_up(runner, scheduler, before)
            self.judge(name, case, self.answer(runner, scheduler, [case])[0])

    def _warm_up(self, runner: RecordingRunner, scheduler: Scheduler, case: Case) -> None:
        params = seqs.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        name, prompt = str(next(self._names)), list(case.prompt)
        scheduler.add(seqs.Sequence(name, prompt, len(prompt), params, SCOPE, arrived=0.0))
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, runner.run(plan))

    def together(
        self, name: str, cases: Sequence[Case], *, budget: int, running: int, blocks: int, size: int
    ) -> None:
        """All at once into a pool of ``blocks`` blocks, then all once more in another order."""
        runner = self.runner(size)
        scheduler = self.scheduler(
            runner, budget=budget, running=running, blocks=blocks, caching=True
        )
        for again, order in enumerate((cases, cases[::-1])):
            asked = self.answer(runner, scheduler, order)
            for case, made in zip(order, asked, strict=True):
                self.judge(f"{name} {'again' if again else 'first'}", case, made)

    def spoilt(self, cases: Sequence[Case], rng: Random) -> int:
        """How many answers change when noise stands in one cached block."""
        runner, changed = self.runner(16), 0
        for case in cases:
            scheduler = self.scheduler(
                runner, budget=512, running=1, blocks=runner.n_blocks, caching=True
            )
            self._warm_up(runner, scheduler, case)
            block = rng.randrange((len(case.prompt) - 1) // 16)
            for layer in runner.pool.layers.values():
                part = slice(block * 16, block * 16 + 16)
                keys, values = layer.keys[:, part], layer.values[:, part]
                layer.keys[:, part] = torch.randn_like(keys) * keys.std() * 4
                layer.values[:, part] = values.flip(0, 1, 2) * 4
            runner.references.clear()
            worst, made = runner.worst, self.answer(runner, scheduler, [case])[0]
            runner.worst = worst
            changed += tuple(made.tokens[made.prompt_len :]) != case.tokens
        return changed
