"""Power of two choices."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gateway.routing.base import Candidate, Query, Scored
from gateway.routing.policies.least_loaded import load_of


class TwoChoices:
    """The less loaded of two workers drawn at random; knows nothing of prefixes.

    Nearly as even as asking all, and gateways that see the same loads do not all run to the same
    worker.
    """

    name = "two_choices"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """A random order in which the first two have been compared by their load."""
        ordered = sorted(candidates, key=lambda item: item.worker.id)
        drawn = rng.sample(ordered, len(ordered))
        drawn[:2] = sorted(drawn[:2], key=lambda item: load_of(item.worker))
        return [Scored(item, float(at)) for at, item in enumerate(drawn)]
