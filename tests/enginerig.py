"""The engine without its thread: requests in, steps by hand, answers out. No ports, no sleeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.errors import ApiError
from shared.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from shared.paging import BlockPool
from shared.types import Tier
from worker.detokenise import Detokenizer
from worker.fake_runner import FakeModel, FakeRunner
from worker.generation import Delta, GenerationRequest
from worker.guide import Grammar
from worker.runner import RunnerError, StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams
from worker.steploop import StepLoop

ROOT = b"r" * 16
OTHER_ROOT = b"s" * 16


def decode(ids: Sequence[int]) -> str:
    """The byte tokenizer's text; specials (>= 256) have none."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def greedy(max_tokens: int = 16, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)  # type: ignore[arg-type]


def prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(97, 123), k=length))


def replay(events: Sequence[CacheEvent], tier: Tier = Tier.GPU) -> set[int]:
    """What a receiver of the events knows of one tier."""
    held: set[int] = set()
    for event in events:
        if not isinstance(event, CacheCleared) and event.tier is not tier:
            continue
        if isinstance(event, BlocksStored):
            assert held.isdisjoint(event.keys)
            assert event.parent is None or event.parent in held
            held.update(event.keys)
        elif isinstance(event, BlocksRemoved):
            assert held.issuperset(event.keys)
            held.difference_update(event.keys)
        elif isinstance(event, CacheCleared):
            held.clear()
    return held


@dataclass
class Answer:
    """What a client saw of one request."""

    deltas: list[Delta] = field(default_factory=list)
    error: ApiError | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def finish(self) -> FinishReason | None:
        return self.deltas[-1].finish if self.deltas else None

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def outcome(self) -> tuple[object, ...]:
        """Everything that must not depend on cache, batch or memory pressure."""
        last = self.last
        logprobs = [(delta.logprobs, delta.prompt_logprobs) for delta in self.deltas]
        return self.text, self.tokens, logprobs, last.finish, last.stop_reason, last.output_tokens


class SpyRunner(FakeRunner):
    """Remembers the plans; loses a step on demand, after writing half of it."""

    def __init__(self, model: FakeModel, *, sleep, clock, rng) -> None:  # type: ignore[no-untyped-def]
        super().__init__(model, sleep=sleep, clock=clock, rng=rng)
        self.plans: list[StepPlan] = []
        self.fail_next = False

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        written: set[int] = set()
        for chunk in plan.chunks:
            own = set(chunk.blocks[chunk.start // self.block_size :])
            assert written.isdisjoint(own), "two chunks of a step write the same block"
            written |= own
        if self.fail_next:
            self.fail_next = False
            half = len(plan.copies) // 2
            super().run(StepPlan(plan.chunks[: len(plan.chunks) // 2], plan.copies[:half]))
            raise RunnerError("lost on purpose")
        return super().run(plan)


class Rig:
    """One engine on a virtual clock."""

    def __init__(
        self,
        n_blocks: int = 40,
        block_size: int = 16,
        budget: int = 64,
        *,
        caching: bool = True,
        max_running: int = 24,
        max_step_ms: float = 0.0,
        max_waiting: int = 100_000,
        seed: int = 1,
        **model: object,
    ) -> None:
        self.model = FakeModel(n_blocks, block_size, **model)  # type: ignore[arg-type]
        self.now = 0.0
        self.answers: dict[str, Answer] = {}
        self.events: list[CacheEvent] = []
        self.order: list[str] = []
        """What left the engine, in order: "events" or the id of a request."""
        self.runner = SpyRunner(
            self.model, sleep=self._sleep, clock=self._clock, rng=random.Random(seed)
        )
        host_blocks = self.model.host_blocks
        self.pool = BlockPool(n_blocks, block_size, caching=caching, host_blocks=host_blocks)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=budget,
            max_running=max_running,
            max_model_len=self.model.max_model_len,
            eos_token_ids=self.model.eos_token_ids,
            max_waiting=max_waiting,
            max_step_ms=max_step_ms,
        )
        self.loop: StepLoop[str] = StepLoop(
            self.runner,
            self.scheduler,
            lambda tokens: Detokenizer(decode, tokens),
            self._clock,
            self._collect,
            self._deliver,
        )

    def _clock(self) -> float:
        return self.now

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _collect(self, events: list[CacheEvent]) -> None:
        self.events += events
        self.order.append("events")

    def _deliver(self, outgoing: list[tuple[str, Delta | ApiError]]) -> None:
        for request_id, item in outgoing:
            self.order.append(request_id)
            answer = self.answers[request_id]
            assert answer.finish is None
            if isinstance(item, ApiError):
                answer.error = item
            else:
                answer.deltas.append(item)

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        root: bytes = ROOT,
        priority: int = 0,
        grammar: Grammar | None = None,
        deadline: float | None = None,
    ) -> str:
        request_id = str(len(self.answers))
        self.answers[request_id] = Answer()
        request = GenerationRequest(
            request_id, tuple(tokens), params, root, priority, grammar, deadline
        )
        self.loop.accept(request, request_id)
        return request_id

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.loop.step()

    def run(self, limit: int = 200_000) -> None:
        """Until nothing is left."""
        for _ in range(limit):
            if not self.loop.step():
                return
        raise AssertionError(f"not done after {limit} steps")

    def answer(self, tokens: Sequence[int], params: SamplingParams, root: bytes = ROOT) -> Answer:
        request_id = self.submit(tokens, params, root=root)
        self.run()
        return self.answers[request_id]

    def check_idle(self) -> None:
        """Nothing is held, nothing is lost, and the events tell what the pool holds."""
        self.scheduler.check()
        self.loop.publish()
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
        assert load.queued_prefill_tokens == 0
        assert self.pool.available == self.pool.n_blocks
        assert replay(self.events) == set(self.pool.snapshot_keys())
        assert replay(self.events, Tier.HOST) == set(self.pool.host.journal.keys())


class Reference:
    """Answers of fresh engines with caching off, one request at a time."""

    def __init__(self, **model: object) -> None:
        self._model = model
        self._known: dict[object, tuple[object, ...]] = {}

    def outcome(self, tokens: Sequence[int], params: SamplingParams) -> tuple[object, ...]:
        key = (tuple(tokens), repr(params))
        if key not in self._known:
            rig = Rig(n_blocks=600, budget=8192, caching=False, **self._model)
            self._known[key] = rig.answer(tokens, params).outcome
        return self._known[key]
