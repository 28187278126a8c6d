"""What the workers of a model hold of one prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from gateway.accounting import matchable_tokens
from gateway.decision import Overlap
from gateway.member import Member
from gateway.routing.base import Trust
from gateway.routing.branches import Popularity
from shared.blocks import GRANULE
from shared.types import WorkerId


class Held(msgspec.Struct, frozen=True):
    """Usable tokens of one prompt on each worker that serves its model."""

    prompt_tokens: int
    """As counted, else estimated from the keys."""
    usable: Mapping[WorkerId, int]
    """Promised ones included."""
    host: Mapping[WorkerId, int]
    """The part that is in the worker's host memory, where there is one."""
    promised: Mapping[WorkerId, int]
    """The part that is only promised, where there is one."""
    trust: Mapping[WorkerId, Trust]
    seen_tokens: int
    popularity: Popularity
    isolated: Mapping[WorkerId, int] = {}
    """What of the prompt they hold under another cache salt."""

    def overlap(self, serving: Sequence[Member], open_to: Collection[Member]) -> Overlap:
        """What was available where. ``open_to``: the workers that take new requests."""
        usable, best, reachable, foreign = self.usable, 0, 0, 0
        sizes = {member.info.block_size for member in serving if member.healthy}
        for member in serving:
            if member.healthy:
                if (tokens := usable[member.id]) > best:
                    best = tokens
                if self.isolated:
                    foreign = max(foreign, self.isolated.get(member.id, 0))
        for member in open_to if best else ():
            if (tokens := usable[member.id]) > reachable:
                reachable = tokens
        matchable, block_size = matchable_tokens(self.prompt_tokens, sizes or {GRANULE})
        return Overlap(
            matchable_tokens=matchable,
            block_size=block_size,
            seen_tokens=self.seen_tokens,
            available_tokens=best,
            draining_tokens=best - reachable if best > reachable else 0,
            isolated_tokens=foreign - best if foreign > best else 0,
        )
