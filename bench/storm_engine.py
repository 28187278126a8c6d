"""The engines of ``bench/storm.py``: one that checks itself and loses steps, one that is right."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

import torch

from bench.storm_load import EOS, MAX_LEN, TENANTS, AdapterFolder, Setting, root_of
from shared.load import AdapterInfo
from shared.paging import BlockPool
from worker.detokenise import Detokenizer
from worker.engine import Delta, GenerationRequest
from worker.model.runner import TorchRunner
from worker.model.weights import describe
from worker.outcome import TokenOut
from worker.runner import RunnerError, StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, TokenLogprob
from worker.steploop import StepLoop


class CheckedScheduler(Scheduler):
    """Proves its invariants before and after each step; its host tier is always open."""

    def host_pays(self) -> bool:
        return True

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
    pool = BlockPool(
        setting.n_blocks, setting.block_size, caching=caching, host_blocks=setting.host_blocks
    )
    return (CheckedScheduler if checked else Scheduler)(
        pool,
        max_batch_tokens=setting.budget,
        max_running=setting.max_running,
        max_model_len=MAX_LEN,
        eos_token_ids=frozenset({EOS}),
        max_waiting=10_000,
        max_step_ms=setting.max_step_ms,
    )


@dataclass(frozen=True)
class Answer:
    """What a client got, or the part that came."""

    text: str
    tokens: list[int]
    finish: FinishReason | None
    scores: tuple[TokenLogprob, ...]
    """Of the prompt, if asked for; empty before they come."""

    def same_scores(self, other: Answer) -> bool:
        """Equal up to rounding."""
        pairs = list(zip(self.scores, other.scores, strict=False))
        return len(self.scores) == len(other.scores) and all(
            mine.rank == its.rank and math.isclose(mine.logprob, its.logprob, abs_tol=1e-6)
            for mine, its in pairs
        )


def joined(deltas: list[Delta]) -> Answer:
    """The answer that a stream amounts to."""
    return Answer(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        deltas[-1].finish if deltas else None,
        tuple(score for delta in deltas for score in delta.prompt_logprobs or ()),
    )


class Alone:
    """Right answers: no cache, no neighbours, the whole prompt in one step, adapters that stay."""

    def __init__(self, model: torch.nn.Module, adapters: tuple[AdapterFolder, ...]) -> None:
        setting = Setting("alone", 160, 16, 8192, 1, 1)
        runner = TorchRunner(describe(model), setting.n_blocks, setting.block_size, threads=1)
        runner.adapters.survey(runner.logits, MAX_LEN)
        for each in adapters:
            read = runner.adapters.read(each.folder)
            runner.adapters.install(AdapterInfo(each.name, read.revision).scope, read)
        self._deltas: list[Delta] = []
        self._loop: StepLoop[None] = StepLoop(
            runner,
            scheduler_of(setting, caching=False, checked=False),
            lambda tokens: Detokenizer(text_of, tokens),
            time.monotonic,
            lambda _: None,
            lambda outgoing: self._deltas.extend(item for _, item in outgoing),  # type: ignore[misc]
        )
        self._known: dict[object, Answer] = {}

    def answer(self, request: GenerationRequest) -> Answer:
        tokens = tuple(request.prompt_tokens)
        key = (tokens, repr(request.params), request.adapter)
        if key not in self._known:
            self._deltas.clear()
            root = root_of(TENANTS[0], request.adapter)
            asked = GenerationRequest(
                "alone", tokens, request.params, root, adapter=request.adapter
            )
            self._loop.accept(asked, None)
            while self._loop.step():
                pass
            self._known[key] = joined(self._deltas)
        return self._known[key]
