"""Nobody in particular."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gateway.routing.base import Candidate, Query, Scored


class RandomChoice:
    """Uniformly at random."""

    name = "random"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """A random order."""
        ordered = sorted(candidates, key=lambda item: item.worker.id)
        shuffled = rng.sample(ordered, len(ordered))
        return [Scored(candidate, float(at)) for at, candidate in enumerate(shuffled)]
