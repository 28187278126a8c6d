"""How fast steps are, and how much prefill fits beside decodes into a time budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import exp, inf, log, sqrt

from worker.runner import Chunk, StepPlan
from worker.steptime import StepTime, Work

MIN_CHUNK = 16
"""Prefill tokens that a step gets if its decodes alone take the time budget or more: it is lost
then, and prefills must advance."""

LEAST = 4
"""Prefill tokens that a step gets whatever is left beside its decodes."""

GROWTH = 2
"""A step beside decodes gets at most so many times the prefill tokens that any step has had yet."""

LIMIT = 1.15
"""A step should not take longer than this times its time budget; a little below what is promised,
1.2."""

WARM_UP = 8
"""Mixed steps whose predictions are not yet judged."""

MEMORY = 256
"""So many predictions are remembered ..."""

EXCUSED = 1
"""... of which so many may have been too low: less than one in a hundred."""

SPREAD = 0.05
"""Predictions are taken to be too low by so much now and then, before it is known (a standard
deviation, relative)."""

SPREAD_WEIGHT = 1 / 32
"""Weight of the newest step, in how far off predictions are."""

CERTAINTY = 3.5
"""So many standard deviations above what is aimed at, a step should still keep the limit ..."""

LEAST_SHARE = 0.75
"""... but at least this share of the time budget is aimed at, whatever the spread."""

MOST_SPREAD = 1.3
"""A step that took longer than so many times its prediction counts as so many: the machine has
changed then, which costs and drift follow, and says little about the spread."""

TINY_S = 1e-9

DRIFT_WEIGHT = 0.4
"""Weight of the newest step, in how much slower than predicted the machine is just now."""

MOST_DRIFT = 1.5
"""A step that took longer than so many times its prediction counts as so many."""

HALF_LIFE_TOKENS = 256
"""A prefill sample counts half after so many more tokens, in the rate that is reported."""

DECODE_WEIGHT = 0.2
"""Weight of the newest decode step, in the rate that is reported."""

MIN_PREFILL_SHARE = 0.1
"""Of a mixed step, at least this share of the time is put down to its prefill tokens."""


class Allowance:
    """What is left for prefills in one step: tokens and seconds."""

    def __init__(
        self, tokens: int, seconds: float = inf, costs: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.tokens = tokens
        self._seconds = seconds
        self._per_token, self._per_attended = costs
        self._untouched = True

    def take(self, start: int, wanted: int) -> int:
        """Tokens that a sequence may compute from position ``start`` on; they are used up then.

        The first one to ask gets :data:`LEAST` tokens even if they take too long, and
        :data:`MIN_CHUNK` if there was no time from the beginning.
        """
        slope = self._per_token + self._per_attended * start
        n = min(wanted, self.tokens, self._that_fit(slope))
        if self._untouched:
            least = LEAST if self._seconds > 0.0 else MIN_CHUNK
            n = max(n, min(wanted, self.tokens, least))
            self._untouched = False
        self.tokens -= n
        self._seconds -= n * slope + n * n / 2 * self._per_attended
        if n == 0 or self._seconds <= 0.0 or self._seconds < self._per_token:
            self.tokens = 0
        return n

    def _that_fit(self, slope: float) -> int:
        """Largest n with n * slope + n² / 2 * attended <= seconds."""
        left = self._seconds
        if left <= 0.0:
            return 0
        bend = sqrt(slope * slope + 2 * self._per_attended * left)
        most = 2 * left / (slope + bend) if slope + bend > 0.0 else inf
        return int(min(most, self.tokens))


class Pace:
    """:param max_step_s: time budget of a step with decoding sequences; 0 = none."""

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._model = StepTime()
        self._largest = 0
        self._mixed = 0
        self._misses: deque[float] = deque(maxlen=MEMORY)
        """Measured / predicted of the latest mixed steps ..."""
        self._sorted: list[float] = []
        """... and in order."""
        self._variance = SPREAD**2
        """Of the logarithm of measured / predicted, where it is above 0."""
        self._drift = 1.0
        """Measured / predicted, of the last few mixed steps."""
        self._decode_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 = not measured yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Of one sequence; 0 = not measured yet."""
        return 1.0 / self._decode_s if self._decode_s else 0.0

    def allowance(self, tokens: int, decodes: Sequence[Chunk]) -> Allowance:
        """What prefills may use beside these decodes, of ``tokens`` at most."""
        if not decodes or not self._max_step_s:
            return Allowance(tokens)
        tokens = min(tokens, max(MIN_CHUNK, GROWTH * self._largest))
        slower = self._slower
        beside = self._model.predict(Work.of(decodes)) * slower
        left = self._max_step_s * self._caution() - beside
        if beside < self._max_step_s:
            left = max(left, TINY_S)  # caution alone is no reason to give the step up as lost
        per_token, per_attended = self._model.prefill_costs
        return Allowance(tokens, left, (per_token * slower, per_attended * slower))

    @property
    def _slower(self) -> float:
        """How much slower than learned the machine is just now. Costs are averages over many steps;
        another process may slow a machine down for a second."""
        return max(1.0, self._drift)

    def _caution(self) -> float:
        """Share of the time budget to aim at: less than all if predictions are often too low, as
        they are by their spread from the first steps on, and by the worst ones seen later."""
        share = max(LEAST_SHARE, LIMIT * exp(-CERTAINTY * sqrt(self._variance)))
        if len(self._sorted) > EXCUSED:
            share = min(share, LIMIT / self._sorted[-1 - EXCUSED])
        return min(1.0, share)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a finished step that computed for so long."""
        work = Work.of(plan.chunks)
        self._largest = max(self._largest, work.tokens)
        if work.tokens:
            if work.decodes and self._model.known:
                self._judge(work, seconds)
            self._count_prefill(work, seconds)
        else:
            self._follow(1.0)  # nothing is predicted here, as a fit costs 0.1 ms
            weight = DECODE_WEIGHT if self._decode_s else 1.0
            self._decode_s += weight * (seconds - self._decode_s)
        self._model.observe(work, seconds)

    def _count_prefill(self, work: Work, seconds: float) -> None:
        own = seconds
        if work.decodes:
            beside = self._model.predict(Work(work.decodes, work.decode_context))
            own = max(seconds - beside, MIN_PREFILL_SHARE * seconds)
        keep = 0.5 ** (work.tokens / HALF_LIFE_TOKENS)
        self._tokens = keep * self._tokens + work.tokens
        self._seconds = keep * self._seconds + own

    def _follow(self, miss: float) -> None:
        self._drift += DRIFT_WEIGHT * (min(miss, MOST_DRIFT) - self._drift)

    def _judge(self, work: Work, seconds: float) -> None:
        """Remember by how much the plan for a mixed step was missed, and the prediction."""
        predicted = max(self._model.predict(work), 1e-9)
        planned = predicted * self._slower
        self._follow(seconds / predicted)
        self._mixed += 1
        if self._mixed <= WARM_UP:
            return
        off = log(min(max(seconds / planned, 1.0), MOST_SPREAD))
        self._variance += SPREAD_WEIGHT * (2 * off * off - self._variance)
        if len(self._misses) == MEMORY:
            del self._sorted[bisect_left(self._sorted, self._misses[0])]
        miss = seconds / planned
        self._misses.append(miss)
        insort(self._sorted, miss)
