"""The engine for measurements: scheduler, pool and step loop, stepped by hand, without HTTP.

Nothing here knows the time or a model: clocks and runner come from outside
(``worker/model/measure.py``). Prompts are random tokens, so nothing is shared that was not meant
to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, Protocol

from shared.errors import ApiError
from shared.paging import BlockPool, spare_blocks
from worker.detokenise import Detokenizer
from worker.generation import Delta, GenerationRequest
from worker.runner import Runner, StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams
from worker.steploop import StepLoop

SCOPE = bytes(16)
FIRST_TOKEN = 17
"""Random prompts use ids from here on: the first ids of most vocabularies are special."""
UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of wall clock and of this process's CPU; a moment or the time between two."""

    wall: float
    cpu: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def by(self, meter: Meter) -> float:
        """The seconds on one of the two."""
        return self.wall if meter == "wall" else self.cpu


NO_TIME = Spent(0.0, 0.0)
Meter = Literal["wall", "cpu"]
"""CPU seconds are the steadier meter for one thread on a busy machine; a GPU needs the wall."""


class Clock(Protocol):
    """Tells the moment."""

    def __call__(self) -> Spent:
        """By wall clock and CPU."""

    def seconds(self) -> float:
        """By wall clock alone: asking for CPU time is a system call, which no worker makes."""


class SwitchedRunner:
    """A runner that can be told to pretend, so that sequences get to a context without computing.

    While ``computing`` is off a step takes no time, writes no KV and answers a fixed token. What
    the sequences attend to afterwards is whatever the KV memory holds: right for timing only.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.computing = True
        self.pretended_s_per_token = 0.0
        """What a pretended step reports as its duration, so that a time budget learns a pace."""
        self.latest = StepPlan(())
        """The step that ran last."""

    n_blocks = property(lambda self: self._runner.n_blocks)
    block_size = property(lambda self: self._runner.block_size)
    host_blocks = property(lambda self: self._runner.host_blocks)
    max_model_len = property(lambda self: self._runner.max_model_len)
    vocab_size = property(lambda self: self._runner.vocab_size)
    eos_token_ids = property(lambda self: self._runner.eos_token_ids)
    adapters = property(lambda self: self._runner.adapters)

    def run(self, plan: StepPlan) -> StepResult:
        """As the runner, or a fixed token for each chunk that samples."""
        self.latest = plan
        if self.computing:
            return self._runner.run(plan)
        token = min(FIRST_TOKEN, self.vocab_size - 1)
        tokens = {chunk.seq_id: token for chunk in plan.chunks if chunk.sample}
        return StepResult(tokens, {}, plan.n_tokens * self.pretended_s_per_token)

    def forget(self, seq_id: str) -> None:
        """As the runner."""
        self._runner.forget(seq_id)

    def close(self) -> None:
        """As the runner."""
        self._runner.close()


@dataclass(slots=True)
class Answer:
    """One request as its client would see it."""

    id: str
    tokens: list[int] = field(default_factory=list)
    at: list[Spent] = field(default_factory=list)
    """When each token was handed on."""
    cached: int = 0
    """Prompt tokens that came from the cache."""
    ended: bool = False

    @property
    def longest_gap(self) -> Spent:
        """The longest time between two tokens, by wall clock and by CPU."""
        gaps = [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]
        return Spent(max(gap.wall for gap in gaps), max(gap.cpu for gap in gaps))


class Drive:
    """A fresh pool, scheduler and step loop over a runner, stepped by hand.

    :param decode: token ids to text; ``None`` gives no text.
    :param blocks: size of the pool; by default all blocks of the runner.
    :param step_ms: time budget of a step beside decodes; 0 = none.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Clock,
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        budget: int = 512,
        running: int = 64,
        blocks: int | None = None,
        step_ms: float = 0.0,
        caching: bool = True,
    ) -> None:
        self.runner = SwitchedRunner(runner)
        size = blocks or runner.n_blocks
        spare = spare_blocks(size)
        self.pool = BlockPool(size, runner.block_size, caching=caching, spare=spare)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=budget,
            max_running=running,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            max_waiting=UNLIMITED,
            max_step_ms=step_ms,
        )
        self.answers: dict[str, Answer] = {}
        self._clock = clock
        text = decode or (lambda _: "")
        self._loop: StepLoop[Answer] = StepLoop(
            self.runner,
            self.scheduler,
            lambda prompt: Detokenizer(text, prompt),
            clock.seconds,
            lambda _: None,
            self._deliver,
        )

    def _deliver(self, outgoing: list[tuple[Answer, Delta | ApiError]]) -> None:
        now = self._clock()
        for answer, delta in outgoing:
            if isinstance(delta, ApiError):
                raise delta
            if delta.token_ids:
                answer.tokens.extend(delta.token_ids)
                answer.at.append(now)
            answer.cached = delta.cached_tokens
            answer.ended = delta.finish is not None

    def submit(self, prompt: Sequence[int], new: int) -> Answer:
        """Queue a greedy request for exactly ``new`` tokens."""
        answer = Answer(str(len(self.answers)))
        self.answers[answer.id] = answer
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        self._loop.accept(GenerationRequest(answer.id, tuple(prompt), params, SCOPE), answer)
        return answer

    def step(self, times: int = 1) -> None:
        """So many forward passes; raises ``AssertionError`` if there is nothing to compute."""
        for _ in range(times):
            if not self._loop.step():
                raise AssertionError("nothing to compute")

    def run(self) -> None:
        """To the end of all requests."""
        while self._loop.step():
            pass

    def until_first(self, answer: Answer) -> None:
        """Step until ``answer`` has a token."""
        while not answer.at:
            self.step()

    def decoders(self, n: int, context: int, new: int, rng: Random) -> list[Answer]:
        """``n`` sequences that decode from now on, behind ``context`` pretended tokens."""
        self.runner.computing = False
        made = [self.submit(self.random(context, rng), new) for _ in range(n)]
        while not all(answer.at for answer in made):
            self.step()
        self.runner.computing = True
        return made

    def random(self, n: int, rng: Random) -> tuple[int, ...]:
        """``n`` random tokens."""
        vocabulary = self.runner.vocab_size
        return tuple(rng.choices(range(min(FIRST_TOKEN, vocabulary - 1), vocabulary), k=n))
