"""How fast steps are, learned from their durations, and how much prefill fits into a time budget.

A step is modelled as ``decode + tokens * prefill``: ``decode`` seconds for its decoding sequences
(average over steps that only decode) and ``prefill`` seconds for each prefill token.
"""

from __future__ import annotations

from worker.runner import StepPlan

HALF_LIFE_TOKENS = 256
"""A prefill sample counts half after so many more tokens: long contexts make tokens dearer."""

DECODE_WEIGHT = 0.2
"""Weight of the newest decode step."""

MIN_PREFILL_SHARE = 0.1
"""Of a mixed step, at least this share of the time is put down to its prefill tokens."""


class Pace:
    """:param max_step_s: time budget of a step with decoding sequences; 0 = none."""

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._decode_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_s_per_token(self) -> float:
        """0 = not measured yet."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 = not measured yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Of one sequence; 0 = not measured yet."""
        return 1.0 / self._decode_s if self._decode_s else 0.0

    def prefill_limit(self) -> int | None:
        """Prefill tokens that fit beside decodes; None = no limit known."""
        per_token = self.prefill_s_per_token
        if not self._max_step_s or not per_token:
            return None
        return max(0, int((self._max_step_s - self._decode_s) / per_token))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a finished step."""
        decodes = plan.n_decodes
        tokens = plan.n_tokens - decodes
        if not tokens:
            weight = DECODE_WEIGHT if self._decode_s else 1.0
            self._decode_s += weight * (seconds - self._decode_s)
            return
        if decodes:
            seconds = max(seconds - self._decode_s, MIN_PREFILL_SHARE * seconds)
        keep = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds
