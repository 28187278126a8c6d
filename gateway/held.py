"""What the workers of a model hold of one prompt, or of a list of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Self

import msgspec

from gateway.accounting import matchable_tokens
from gateway.decision import Overlap
from gateway.member import Member
from gateway.routing.base import Trust
from gateway.routing.branches import NOBODY, Popularity
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
    prompts: tuple[Held, ...] = ()
    """Of a list of prompts: each by itself; the others are their sums then."""

    @classmethod
    def of_list(cls, prompts: Sequence[Held]) -> Self:
        """What is held of prompts (one at least) that go to one worker together.

        What pays itself back of recomputing them is not reckoned: it is known prompt by prompt.
        """
        return cls(
            prompt_tokens=sum(one.prompt_tokens for one in prompts),
            usable=_sums(one.usable for one in prompts),
            host=_sums(one.host for one in prompts),
            promised=_sums(one.promised for one in prompts),
            trust=prompts[0].trust,
            seen_tokens=sum(one.seen_tokens for one in prompts),
            popularity=NOBODY,
            prompts=tuple(prompts),
        )

    def matchable_tokens(self, sizes: Iterable[int]) -> tuple[int, int]:
        """What could be reused at best, with which of the (one or more) block sizes."""
        if not self.prompts:
            return matchable_tokens(self.prompt_tokens, sizes)
        found = [matchable_tokens(one.prompt_tokens, sizes) for one in self.prompts]
        return sum(tokens for tokens, _ in found), found[0][1]

    def overlap(self, serving: Sequence[Member], open_to: Collection[Member]) -> Overlap:
        """What was available where. ``open_to``: the workers that take new requests."""
        if self.prompts:
            return _sum_of([one.overlap(serving, open_to) for one in self.prompts])
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


def _sums(parts: Iterable[Mapping[WorkerId, int]]) -> Mapping[WorkerId, int]:
    found = Counter[WorkerId]()
    for part in parts:
        found.update(part)
    return found


def _sum_of(overlaps: Sequence[Overlap]) -> Overlap:
    """Of a list of prompts. Each is available where most of it is, be that several workers: a
    part that the chosen one lacks is lost to others, and not evicted."""
    return Overlap(
        matchable_tokens=sum(one.matchable_tokens for one in overlaps),
        block_size=overlaps[0].block_size,
        # What is held has been seen, or it would hide what of another prompt is evicted.
        seen_tokens=sum(
            max(one.seen_tokens, one.available_tokens + one.isolated_tokens) for one in overlaps
        ),
        available_tokens=sum(one.available_tokens for one in overlaps),
        draining_tokens=sum(one.draining_tokens for one in overlaps),
        isolated_tokens=sum(one.isolated_tokens for one in overlaps),
    )
