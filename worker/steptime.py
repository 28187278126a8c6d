"""How long a step takes, learned from the steps that were: a sum of five costs, none negative.

A step's seconds are modelled as *fixed* + decodes x *per decode* + tokens they attend to x *per
attended token* + prefill tokens x *per token* + tokens those attend to x *per attended token*.
The costs are fitted to recent steps by least squares of the relative error, so a rare step that
takes far too long (another process, a collection of garbage) hardly moves them. Steps with prefill
and steps without are forgotten separately: a thousand decodes do not wipe out what is known about
prefills. What the steps do not tell is drawn towards a guess that errs on the expensive side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import msgspec

from worker.runner import Chunk

GUESS = (8.0, 2.0, 1 / 1024, 1.0, 1 / 2048)
"""Costs before they are known, in prefill tokens: of a step, a decode, a token that a decode
attends to, a prefill token, a token that a prefill token attends to."""

KEEP = 0.97
"""Weight of a step when the next one of its kind is known."""

HEAVY = 1e6
"""Weights are made small again before they grow beyond it."""

TRUST_IN_GUESS = 0.05
"""Weight of the guess, in steps."""


class Work(msgspec.Struct, frozen=True):
    """What a step has to do, as far as its duration depends on it."""

    decodes: int = 0
    decode_context: int = 0
    """Tokens that the decodes attend to."""
    tokens: int = 0
    """Prefill tokens."""
    context: int = 0
    """Tokens that the prefill tokens attend to, summed over them."""

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Self:
        """The work of a step."""
        decodes = decode_context = tokens = context = 0
        for chunk in chunks:
            n = len(chunk.tokens)
            if chunk.decode:
                decodes += 1
                decode_context += chunk.start
            else:
                tokens += n
                context += n * chunk.start + n * n // 2
        return cls(decodes, decode_context, tokens, context)

    @property
    def features(self) -> tuple[float, ...]:
        """In the order of the costs, in guessed prefill tokens."""
        step, decode, decode_context, token, context = GUESS
        return (
            step,
            self.decodes * decode,
            self.decode_context * decode_context,
            self.tokens * token,
            self.context * context,
        )


class _Evidence:
    """Sums over steps of one kind that least squares need; older steps count less."""

    def __init__(self) -> None:
        self._newest = 1.0
        """Weight of the next step in the sums: it grows, where that of all others would shrink."""
        self.weight = 0.0
        self.scale = 0.0
        """Sum of seconds per guessed token."""
        self.gram = [[0.0] * len(GUESS) for _ in GUESS]
        self.moment = [0.0] * len(GUESS)

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        newest = self._newest = self._newest / KEEP
        self.weight += newest
        self.scale += newest * seconds / sum(features)
        relative = [(i, each / seconds) for i, each in enumerate(features) if each]
        for i, one in relative:
            weighted = newest * one
            self.moment[i] += weighted
            row = self.gram[i]
            for j, other in relative:
                row[j] += weighted * other
        if newest > HEAVY:
            self.settle()

    def settle(self) -> None:
        """Give the newest step a weight of 1."""
        unit, self._newest = 1.0 / self._newest, 1.0
        self.weight *= unit
        self.scale *= unit
        self.moment = [each * unit for each in self.moment]
        self.gram = [[each * unit for each in row] for row in self.gram]


class StepTime:
    """The fitted costs."""

    def __init__(self) -> None:
        self._decoding, self._prefilling = _Evidence(), _Evidence()
        self._costs = [0.0] * len(GUESS)
        """Seconds per guessed prefill token, by kind of cost."""
        self._fresh = True

    @property
    def known(self) -> bool:
        """Whether any step with prefill has been seen."""
        return self._prefilling.weight > 0.0

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step."""
        if seconds <= 0.0:
            return
        (self._prefilling if work.tokens else self._decoding).add(work.features, seconds)
        self._fresh = False

    def predict(self, work: Work) -> float:
        """Seconds that a step takes; 0 before anything is known."""
        costs = self._fitted()
        return sum(cost * each for cost, each in zip(costs, work.features, strict=True))

    @property
    def prefill_costs(self) -> tuple[float, float]:
        """Seconds of a prefill token, and of each token it attends to."""
        costs = self._fitted()
        return costs[3] * GUESS[3], costs[4] * GUESS[4]

    def _fitted(self) -> list[float]:
        if not self._fresh:
            self._fit()
            self._fresh = True
        return self._costs

    def _fit(self) -> None:
        """Least squares with a pull towards the guess; costs that come out negative are 0."""
        one, two = self._decoding, self._prefilling
        one.settle()
        two.settle()
        scale = (one.scale + two.scale) / (one.weight + two.weight)
        places = range(len(GUESS))
        pull = TRUST_IN_GUESS / (scale * scale)
        gram = [[one.gram[i][j] + two.gram[i][j] for j in places] for i in places]
        for i in places:
            gram[i][i] += pull
        moment = [one.moment[i] + two.moment[i] + pull * scale for i in places]
        free = list(places)
        while True:
            found = _solve([[gram[i][j] for j in free] for i in free], [moment[i] for i in free])
            if min(found) >= 0.0:
                break
            free = [i for i, cost in zip(free, found, strict=True) if cost >= 0.0]
        self._costs = [0.0] * len(GUESS)
        for i, cost in zip(free, found, strict=True):
            self._costs[i] = cost


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solution of a positive definite system, by elimination. Changes its arguments."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i]
        for j in range(i + 1, size):
            row = matrix[j]
            factor = row[i] / pivot[i]
            for k in range(i + 1, size):
                row[k] -= factor * pivot[k]
            right[j] -= factor * right[i]
    for i in reversed(range(size)):
        row = matrix[i]
        right[i] = (right[i] - sum(row[k] * right[k] for k in range(i + 1, size))) / row[i]
    return right
