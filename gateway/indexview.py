"""What can be said about the index: plain values for operators, and who makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.index.base import PrefixIndex
from gateway.knowledge import Knowledge
from gateway.member import Member
from gateway.routing.base import Query, Trust, WorkerState
from shared.blocks import GRANULE
from shared.types import Tier, WorkerId


@dataclass(frozen=True, slots=True)
class WorkerContents:
    """What the index says one worker holds."""

    id: WorkerId
    models: tuple[str, ...]
    trust: Trust
    trust_reason: str
    blocks: int
    """Index entries, of the worker's own block size or 16 tokens, whatever is larger."""
    host_blocks: int
    """Those in its host memory."""
    tokens: int
    """Both together."""
    block_tokens: int
    """Tokens per entry."""
    epoch: int
    seq: int | None
    """Last batch of its own events; None: none was applied."""
    learned_tokens: int
    """What it is believed to hold at most, where that is learned."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The whole index of one gateway."""

    entries: int
    """(block, worker) pairs, what is learned beside events included."""
    max_entries: int
    seen_blocks: int
    """Blocks remembered as served once, here or not any more."""
    shared_prefixes: int
    """Blocks below which prompts have branched."""
    workers: list[WorkerContents]


@dataclass(frozen=True, slots=True)
class Holder:
    """What one worker has of a prompt; tokens it can reuse."""

    id: WorkerId
    state: WorkerState
    trust: Trust
    tokens: int
    host_tokens: int
    """The part in its host memory."""
    promised_tokens: int
    """The part that is only on its way there."""


@dataclass(frozen=True, slots=True)
class WhoHolds:
    """Who has how much of one prompt."""

    prompt_tokens: int
    """As counted, else estimated from its text."""
    matchable_tokens: int
    """What could be reused at best: whole blocks without the last token."""
    seen_tokens: int
    """What this gateway has seen served before."""
    holders: list[Holder]
    """All workers of the model, those that hold most first."""


class IndexReader:
    """Looks, and changes nothing."""

    def __init__(self, index: PrefixIndex, knowledge: Knowledge, max_entries: int) -> None:
        self._index, self._knowledge, self._max = index, knowledge, max_entries

    def stats(self, members: Sequence[Member]) -> IndexStats:
        """What the index holds of these workers."""
        entries = self._knowledge.entries
        ids = [member.id for member in members]
        seen, branched = self._knowledge.sizes
        return IndexStats(
            entries=sum(entries(one) + entries(one, beside=True) for one in ids),
            max_entries=self._max,
            seen_blocks=seen,
            shared_prefixes=branched,
            workers=[self._contents(member) for member in members],
        )

    def _contents(self, member: Member) -> WorkerContents:
        trust, reason = self._knowledge.trust.of(member.id)
        position = self._index.position(member.id)
        unit = member.stride * GRANULE
        return WorkerContents(
            id=member.id,
            models=member.info.models,
            trust=trust,
            trust_reason=reason,
            blocks=self._index.blocks(member.id),
            host_blocks=self._index.blocks(member.id, Tier.HOST),
            tokens=self._knowledge.entries(member.id) * unit,
            block_tokens=unit,
            epoch=member.info.epoch,
            seq=None if position is None else position[1],
            learned_tokens=self._knowledge.capacity_tokens(member),
        )

    def who(self, query: Query, serving: Sequence[Member], now: float) -> WhoHolds:
        """Who has how much of a prompt; ``serving``: one worker or more."""
        held = self._knowledge.lookup.held(query, serving, (), now)
        sizes = [member.info.block_size for member in serving]
        holders = [
            Holder(
                id=member.id,
                state=member.state(now),
                trust=held.trust[member.id],
                tokens=held.usable[member.id],
                host_tokens=held.host.get(member.id, 0),
                promised_tokens=held.promised.get(member.id, 0),
            )
            for member in serving
        ]
        return WhoHolds(
            prompt_tokens=held.prompt_tokens,
            matchable_tokens=held.matchable_tokens(sizes)[0],
            seen_tokens=held.seen_tokens,
            holders=sorted(holders, key=lambda holder: (-holder.tokens, holder.id)),
        )
