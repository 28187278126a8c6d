"""The placement that was recorded, as a policy. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from gateway.routing.base import Candidate, Query, Scored

RECORDED = "recorded"


class RecordedPlaces:
    """Each request where it went; of one that went to nobody known, the first worker."""

    name = RECORDED

    def __init__(self, places: Mapping[int, int]) -> None:
        """``places``: number of the worker by number of the request (which is its id here)."""
        self._places = places

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """The recorded worker first."""
        place = self._places.get(int(query.request_id), 0)
        return sorted(
            (Scored(candidate, float(at != place)) for at, candidate in enumerate(candidates)),
            key=lambda scored: scored.cost,
        )
