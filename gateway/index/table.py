"""In-process prefix index: one :class:`Holdings` per stride, and the numbering of event batches.

Rules, per (worker, epoch, source):
- Batches count up by one from 1. A repeated number is dropped. After a missing one nothing is
  believed until a snapshot comes; what was known stays in use meanwhile.
- A newer epoch empties the worker; batches of an older one are dropped.
- ``CacheCleared``, ``Snapshot`` and ``forget`` cost their caller nothing but a new slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from gateway.index.base import Applied, Contents, Learned, Match
from gateway.index.holdings import Holdings
from gateway.index.links import Links
from gateway.index.slots import Slot
from shared.blocks import GRANULE
from shared.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    EventBatch,
    Snapshot,
)
from shared.types import BlockKey, Epoch, Tier, WorkerId

COMPACT_FROM = 1 << 15
"""Keys of a stride up to which a dict is smaller than what the large storage needs to be loaded."""
_SLICE = 2048
"""Entries swept by each call that mutates."""


@dataclass(slots=True)
class _Source:
    """Position in one writer's numbering."""

    seq: int
    broken: bool = False
    """A batch is missing: nothing but a snapshot is believed."""


@dataclass(slots=True)
class _Holder:
    """What is known of one worker."""

    epoch: Epoch
    stride: int
    slot: Slot
    closed: bool = False
    """It holds whole beginnings of prompts only, as its make does."""
    host: Slot | None = None
    """What it holds in host memory; opened when it first says so."""
    sources: dict[str, _Source] = field(default_factory=dict)
    learned: Contents | None = None
    """What is learned of it, in place of events: its slots are empty then."""

    @property
    def learned_blocks(self) -> int:
        return 0 if self.learned is None else self.learned.entries


class PrefixTable:
    """Implements :class:`gateway.index.base.PrefixIndex` with a :class:`Holdings` per stride.

    :param max_blocks: cap on (block, worker) entries; beyond it random entries with few holders go.
    :param rng: only used to pick what is dropped.
    """

    def __init__(self, max_blocks: int, rng: Random) -> None:
        self._max = max_blocks
        self._rng = rng
        self.compact: Callable[[Holdings], Holdings] | None = None
        """Makes a large storage out of a small one; see ``gateway.index.backends``."""
        self.compact_from = COMPACT_FROM
        self._strides: dict[int, Holdings] = {}
        self._holders: dict[WorkerId, _Holder] = {}
        self._learning: dict[WorkerId, _Holder] = {}
        """Those with contents that are learned."""
        self._links = Links()
        self.ignored_events = 0
        """Events of tiers or strides that are not indexed here."""

    def __repr__(self) -> str:
        return f"PrefixTable({self.entries} entries, {len(self._holders)} workers)"

    @property
    def told(self) -> int:
        """Those that events told."""
        return sum(holdings.entries for holdings in self._strides.values())

    @property
    def entries(self) -> int:
        """(block, worker) pairs."""
        return self.told + sum(holder.learned_blocks for holder in self._learning.values())

    @property
    def _bound(self) -> int:
        """What ``entries`` is at most."""
        told = sum(holdings.bound for holdings in self._strides.values())
        return told + sum(holder.learned_blocks for holder in self._learning.values())

    def join(self, worker: WorkerId, epoch: Epoch, stride: int, *, closed: bool = False) -> None:
        """Make room for a worker; another epoch or stride empties what was known."""
        holder = self._holders.get(worker)
        if holder is not None:
            if holder.epoch == epoch and holder.stride == stride:
                return
            self.forget(worker)
        holdings = self._strides.setdefault(stride, Holdings())
        slot = holdings.open(worker, sworn=closed)
        self._holders[worker] = _Holder(epoch, stride, slot, closed)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker and all it held."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._learning.pop(worker, None)
            self._strides[holder.stride].abandon(holder.slot)
            self._leave_host(holder)
        self.tidy(_SLICE)

    def blocks(self, worker: WorkerId, tier: Tier = Tier.GPU) -> int:
        """Index entries of one worker and tier."""
        holder = self._holders.get(worker)
        slot = None if holder is None else holder.host if tier is Tier.HOST else holder.slot
        if holder is None or slot is None or tier is Tier.DISK:
            return 0
        self._strides[holder.stride].settle()
        return slot.count + (holder.learned_blocks if slot is holder.slot else 0)

    def position(self, worker: WorkerId, source: str = "worker") -> tuple[Epoch, int] | None:
        """Epoch and last applied sequence number; None if nothing was applied yet."""
        holder = self._holders.get(worker)
        if holder is None or source not in holder.sources:
            return None
        return holder.epoch, holder.sources[source].seq

    def match(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, Match]:
        """Workers that hold a prefix of ``keys`` (one per granule). Exact; a hole ends it."""
        found: dict[WorkerId, Match] = {}
        for stride, holdings in self._strides.items():
            wanted = keys if stride == 1 else keys[stride - 1 :: stride]
            for depth, mask in holdings.depths(wanted) if holdings.bound else ():
                result = Match(depth * stride * GRANULE)
                for worker in holdings.workers_in(mask):
                    found[worker] = result
            for worker, holder in self._learning.items():
                if holder.stride == stride and holder.learned is not None:
                    depth = holder.learned.depth(wanted)
                    if depth:
                        found[worker] = Match(depth * stride * GRANULE)
            if holdings.tiered:
                self._extend(holdings, wanted, stride * GRANULE, found)
        return found

    def _extend(
        self,
        holdings: Holdings,
        wanted: Sequence[BlockKey],
        step: int,
        found: dict[WorkerId, Match],
    ) -> None:
        """Go on in host memory where a match on the device ends; ``step`` tokens per key."""
        ends = {0, *(match.tokens // step for match in found.values())}
        for depth in sorted(end for end in ends if end < len(wanted)):
            for slot in holdings.lower_at(wanted[depth]):
                known = found.get(slot.worker)
                holder = self._holders[slot.worker]
                if depth == (0 if known is None else known.tokens // step):
                    end = holdings.end_of_run(wanted, depth, holder.slot.bit | slot.bit)
                    found[slot.worker] = Match(end * step, (end - depth) * step)

    def apply(self, batch: EventBatch) -> Applied:
        """Take a batch in, if it is the next of its (worker, epoch, source)."""
        holder = self._holders.get(batch.worker)
        if holder is None:
            return Applied(True, "unknown_worker")
        if batch.epoch < holder.epoch:
            return Applied(True, "old_epoch")
        if batch.epoch > holder.epoch:
            self.join(batch.worker, batch.epoch, holder.stride, closed=holder.closed)
            holder = self._holders[batch.worker]
        if batch.stride != holder.stride:
            self.ignored_events += len(batch.events)
            return Applied(True, "wrong_stride")
        verdict = _check_sequence(holder, batch)
        if verdict.reason == "applied":
            holder.sources[batch.source] = _Source(batch.seq)
            if holder.learned is not None:
                self._detach(batch.worker, holder)
            for event in batch.events:
                self._take(batch.worker, holder, event)
            if holder.closed:
                self._see_holes(holder, batch.events)
            self._keep_cap(holder.stride)
        self.tidy(_SLICE)
        return verdict

    def attach(self, worker: WorkerId, contents: Contents) -> None:
        """What is learned of a worker is found here, in place of what its events said."""
        holder = self._holders.get(worker)
        if holder is None or holder.learned is contents:
            return
        if holder.sources or holder.slot.count:
            self.forget(worker)
            self.join(worker, holder.epoch, holder.stride, closed=holder.closed)
            holder = self._holders[worker]
        holder.learned = contents
        self._learning[worker] = holder

    def _detach(self, worker: WorkerId, holder: _Holder) -> None:
        """It has begun to tell itself what it holds."""
        del self._learning[worker]
        if holder.learned is not None:
            holder.learned.clear()
            holder.learned = None

    def learn(self, worker: WorkerId, change: Learned) -> None:
        """What was learned of a worker has changed; of an unknown one it is dropped."""
        holder = self._holders.get(worker)
        if holder is None:
            return
        if holder.learned is None:
            if change.cleared:
                self._empty(worker, holder)
            holdings = self._strides[holder.stride]
            holdings.remove(holder.slot, change.lost, nested=True)
            holdings.remove(holder.slot, change.evicted, nested=True)
            holdings.add(holder.slot, change.stored, nested=True)
        if change.stored:
            self._keep_cap(holder.stride)
        self.tidy(_SLICE)

    def tidy(self, budget: int) -> bool:
        """Give back memory of what was dropped, at most ``budget`` entries; True: some is left."""
        left, unswept = budget, False
        for stride, holdings in list(self._strides.items()):
            if not holdings.swept:
                left = holdings.sweep(left)
                if not holdings.swept:
                    unswept = True
                    continue
            used = holdings.bound or any(h.stride == stride for h in self._holders.values())
            if not used:
                del self._strides[stride]
        return unswept

    def check(self) -> None:
        """Raise ``AssertionError`` if the books do not balance. O(everything): for tests."""
        for holdings in self._strides.values():
            holdings.check()

    def _take(self, worker: WorkerId, holder: _Holder, event: CacheEvent) -> None:
        holdings = self._strides[holder.stride]
        if isinstance(event, CacheCleared):
            self._empty(worker, holder)
        elif event.tier is Tier.DISK:
            self.ignored_events += 1
        else:
            if isinstance(event, Snapshot):
                self._empty(worker, holder, event.tier)
            slot = holder.slot
            if event.tier is Tier.HOST:
                slot = holder.host = holder.host or holdings.open(worker, lower=True)
            change = holdings.remove if isinstance(event, BlocksRemoved) else holdings.add
            change(slot, event.keys.tolist(), nested=holder.closed)

    def _see_holes(self, holder: _Holder, events: Sequence[CacheEvent]) -> None:
        """Notice if a key was stored without its parent, or removed before its child, as far as is
        known which that is."""
        holdings, slot, links = self._strides[holder.stride], holder.slot, self._links
        for event in events:
            if isinstance(event, BlocksStored) and event.tier is Tier.GPU:
                keys, parent = event.keys.tolist(), event.parent
                links.note(keys, parent)
                orphaned = parent is not None and not holdings.holds(slot, parent)
                if orphaned and keys and holdings.holds(slot, keys[0]):
                    holdings.doubt(slot)
        for event in events:
            if isinstance(event, BlocksRemoved) and event.tier is Tier.GPU:
                keys = event.keys.tolist()
                if not holdings.holds_any(slot, list(links.below(keys))):
                    continue
                # Unless the key has come back as well.
                gone = [key for key in keys if not holdings.holds(slot, key)]
                if holdings.holds_any(slot, list(links.below(gone))):
                    holdings.doubt(slot)

    def _empty(self, worker: WorkerId, holder: _Holder, tier: Tier = Tier.GPU) -> None:
        """Forget what it holds; with the device's contents go those of host memory."""
        if tier is Tier.GPU:
            holdings = self._strides[holder.stride]
            holdings.abandon(holder.slot)
            holder.slot = holdings.open(worker, sworn=holder.closed)
        self._leave_host(holder)

    def _leave_host(self, holder: _Holder) -> None:
        if holder.host is not None:
            self._strides[holder.stride].abandon(holder.host)
            holder.host = None

    def _keep_cap(self, stride: int) -> None:
        holdings = self._strides[stride]
        if self.compact and type(holdings) is Holdings and holdings.keys >= self.compact_from:
            self._strides[stride] = self.compact(holdings)
        if self._bound <= self._max:
            return
        excess = self.entries - self._max
        if excess > 0:
            # A little more than it must, so that it is not done for every batch.
            self._drop(stride, excess + self._max // 512)

    def _drop(self, stride: int, excess: int) -> None:
        """Of what events said, or of what was learned of one worker: whatever is more."""
        told = self._strides[stride].entries
        most = max(self._learning.values(), key=lambda one: one.learned_blocks, default=None)
        if most is not None and most.learned is not None and most.learned_blocks > told:
            most.learned.shed(excess)
        else:
            self._strides[stride].drop(excess, self._rng)


def _check_sequence(holder: _Holder, batch: EventBatch) -> Applied:
    source = holder.sources.get(batch.source)
    last = 0 if source is None else source.seq
    broken = source is not None and source.broken
    if any(isinstance(event, Snapshot) and event.tier is Tier.GPU for event in batch.events):
        if batch.seq >= last:
            return Applied(True, "applied")
        return Applied(False, "gap") if broken else Applied(True, "duplicate")
    if broken:
        return Applied(False, "gap")
    if batch.seq <= last:
        return Applied(True, "duplicate")
    if batch.seq == last + 1:
        return Applied(True, "applied")
    # A source of which nothing was applied stays absent: ``position`` must not invent one, and
    # whatever comes before a snapshot is a gap again.
    if source is not None:
        source.broken = True
    return Applied(False, "gap")
