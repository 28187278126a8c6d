"""An engine's block ids -> our index keys, for one worker and rank.

The engine's hashes are opaque names. What they stand for is chained anew over the tokens that their
events carry, with our own hash, so engines of any make and block size meet prompts in one index.

    stored    tokens continue the chain of their parent; a key falls on each block that ends on a
              multiple of 16 tokens, which is where the index of that block size has its keys
    orphan    the parent is not known: parked until it comes, never guessed
    removed   one copy less on that tier; the key goes with the last copy of the last block of it
    cleared   everything is gone, in no time

A block whose scope is not known (an adapter without a name, or one nobody serves) is left out, and
so is all that continues it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.engines.aliastable import Added, AliasTable
from gateway.engines.base import Cleared, EngineEvent, Frame, Removed, Stored
from shared.blocks import GRANULE_BYTES, key_of, next_state, pack_tokens
from shared.events import CacheCleared, CacheEvent, removed, stored
from shared.types import Tier

ORPHANS = 4096
"""Events that wait for their parents at most."""
ORPHAN_S = 5.0
"""How long they wait."""
UNSCOPED = 200_000
"""Blocks of unknown scope that are remembered, to leave out what continues them."""
TAIL_ROWS = 500_000
"""Rows with an unfinished granule (block sizes that are no multiple of 16): 150 bytes each."""
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Groups whose blocks form prefixes; windows and states do not."""

Root = Callable[[str, str], bytes | None]
"""(adapter's name, salt) -> first state of the hash chain; None: the adapter is not known."""


@dataclass(slots=True)
class MapStats:
    """What a map has met since it was made."""

    stored: int = 0
    """Blocks."""
    removed: int = 0
    repeated: int = 0
    """Blocks that were stored though they were there already."""
    orphans: int = 0
    """Events whose parent was not known when they came."""
    abandoned: int = 0
    """Orphans whose parent never came: something was lost."""
    unknown_removals: int = 0
    """Removed blocks that nobody had announced."""
    unscoped: int = 0
    """Events of an adapter that is not known."""
    other_groups: int = 0
    """Events of groups that are not indexed."""


@dataclass(slots=True)
class _Orphan:
    event: Stored
    until: float


class KeyMap:
    """The contents of one rank's cache, told in its events.

    :param block_size: tokens per block that the index expects; events of another size are left out
        and named in :attr:`other_size`.
    """

    def __init__(self, root: Root, block_size: int, *, tail_rows: int = TAIL_ROWS) -> None:
        self._root = root
        self.block_size = block_size
        self._tail_rows = tail_rows
        self.stats = MapStats()
        self.other_size = 0
        """Block size of events that do not fit; 0: none came."""
        self.full = False
        """There are too many unfinished granules: nothing more is taken in."""
        self._group: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._rows = AliasTable(16)
        self._keys = AliasTable(0)
        self._tails: dict[int, bytes] = {}
        self._orphans: dict[int, list[_Orphan]] = {}
        self._waiting: deque[tuple[float, int]] = deque()
        self._gone: set[int] = set()
        self._unscoped: set[int] = set()
        self._out: list[CacheEvent] = []

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._rows)

    @property
    def n_bytes(self) -> int:
        """Memory, about."""
        return self._rows.n_bytes + self._keys.n_bytes + 150 * len(self._tails)

    def forget(self) -> None:
        """The cache is empty, or nothing is known of it any more. Tells nobody."""
        self._begin()

    def take(self, frame: Frame, now: float) -> list[CacheEvent]:
        """What a frame means for the index, in order."""
        for event in frame.events:
            self._take(event, now)
        self.expire(now)
        out, self._out = self._out, []
        return out

    def expire(self, now: float) -> int:
        """Give up orphans that have waited too long; how many there were in all."""
        while self._waiting and (self._waiting[0][0] <= now or len(self._waiting) > ORPHANS):
            _, parent = self._waiting.popleft()
            parked = self._orphans.get(parent)
            if parked:
                parked.pop(0)
                self.stats.abandoned += 1
                if not parked:
                    del self._orphans[parent]
        if not self._waiting:
            self._gone.clear()
        return self.stats.abandoned

    def contents(self) -> dict[Tier, list[int]]:
        """All keys by tier. O(everything)."""
        found: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        for key in self._keys:
            for tier in Tier:
                if self._keys.copies(key, tier):
                    found[tier].append(key)
        return found

    def _take(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, Cleared):
            self._begin()
            self._out = [CacheCleared()]
        elif isinstance(event, Removed):
            if event.group is None or event.group == self._group:
                self._remove(event)
            else:
                self.stats.other_groups += 1
        elif not self._indexed(event):
            self.stats.other_groups += 1
        elif not event.tokens:
            self._move(event)
        elif event.block_size != self.block_size:
            self.other_size = event.block_size
        elif not self.full:
            self._store(event, now)

    def _indexed(self, event: Stored) -> bool:
        """Of several groups, the first whose blocks form prefixes is the one that is indexed."""
        if event.group is None:
            return True
        if event.kind not in _PREFIX_KINDS:
            return False
        if self._group is None:
            self._group = event.group
        return event.group == self._group

    # ---------------------------------------------------------------- stored

    def _store(self, event: Stored, now: float) -> None:
        if event.parent is None:
            begin = None if event.adapter is None else self._root(event.adapter, event.salt)
            if begin is None:
                self._leave_out(event)
                return
            state, tail = begin, b""
        else:
            row = self._rows.get(event.parent)
            if row is None and event.parent in self._unscoped:
                self._leave_out(event)
                return
            if row is None:
                self._park(event, now)
                return
            state, tail = row, self._tails.get(event.parent, b"")
        self._chain(event, state, tail)
        if self._orphans:
            self._adopt(event, now)

    def _leave_out(self, event: Stored) -> None:
        self.stats.unscoped += 1
        if len(self._unscoped) > UNSCOPED:
            self._unscoped.clear()
        self._unscoped.update(event.ids)

    def _chain(self, event: Stored, state: bytes, tail: bytes) -> None:
        """Hash the blocks below a known state; ``tail``: tokens since the last full granule."""
        data, width = pack_tokens(event.tokens), event.block_size * 4
        rows, keys, tier = self._rows, self._keys, event.tier
        parent = None if event.parent is None or tail else key_of(state)
        run: list[int] = []
        repeated = 0
        for index, block in enumerate(event.ids):
            if event.extras and event.extras[index]:
                state = next_state(state, b"", event.extras[index])
            piece = tail + data[index * width : (index + 1) * width]
            whole = len(piece) - len(piece) % GRANULE_BYTES
            for at in range(0, whole, GRANULE_BYTES):
                state = next_state(state, piece[at : at + GRANULE_BYTES])
            tail = piece[whole:]
            if event.repeats and event.parent is None and rows.copies(block, tier):
                repeated += 1
                continue
            added = rows.add(block, tier, state)
            repeated += added is Added.COPY
            if tail:
                if added is Added.ROW:
                    self._keep_tail(block, tail)
                continue
            # The row's own state, should the engine use one name for two contents.
            key = key_of(state if added is not Added.TIER else rows.get(block) or state)
            if added is not Added.COPY and keys.add(key, tier) is not Added.COPY:
                run.append(key)
                continue
            if run:
                self._out.append(stored(run, parent, tier))
                run = []
            parent = key
        self.stats.stored += len(event.ids)
        self.stats.repeated += repeated
        if run:
            self._out.append(stored(run, parent, tier))

    def _keep_tail(self, block: int, tail: bytes) -> None:
        self._tails[block] = tail
        if len(self._tails) > self._tail_rows:
            self.full = True

    def _move(self, event: Stored) -> None:
        """Blocks that are known came to a further tier."""
        for block in event.ids:
            row = self._rows.get(block)
            if row is None:
                self.stats.unknown_removals += 1
                continue
            moved = self._rows.add(block, event.tier) is Added.TIER and block not in self._tails
            if moved and self._keys.add(key_of(row), event.tier) is not Added.COPY:
                self._out.append(stored([key_of(row)], None, event.tier))

    # ---------------------------------------------------------------- orphans

    def _park(self, event: Stored, now: float) -> None:
        assert event.parent is not None
        self.stats.orphans += 1
        self._orphans.setdefault(event.parent, []).append(_Orphan(event, now + ORPHAN_S))
        self._waiting.append((now + ORPHAN_S, event.parent))

    def _adopt(self, event: Stored, now: float) -> None:
        """Take in what waited for blocks that have just come, and what waited for those."""
        arrived = [event]
        while arrived:
            parent = arrived.pop()
            for block in parent.ids:
                for orphan in self._orphans.pop(block, ()):
                    state = self._rows.get(block)
                    if state is None or orphan.until <= now:
                        self.stats.abandoned += 1
                        continue
                    self._chain(orphan.event, state, self._tails.get(block, b""))
                    arrived.append(orphan.event)
                    gone = tuple(b for b in orphan.event.ids if b in self._gone)
                    if gone:
                        self._gone.difference_update(gone)
                        self._remove(Removed(gone, orphan.event.tier))

    # ---------------------------------------------------------------- removed

    def _remove(self, event: Removed) -> None:
        gone: list[int] = []
        for block in event.ids:
            row = self._rows.get(block)
            if row is None:
                self.stats.unknown_removals += 1
                self._unscoped.discard(block)
                if self._orphans:
                    self._gone.add(block)
                continue
            self.stats.removed += 1
            if not self._rows.remove(block, event.tier):
                continue
            if block in self._tails:
                if self._rows.get(block) is None:
                    del self._tails[block]
            elif self._keys.remove(key_of(row), event.tier):
                gone.append(key_of(row))
        if gone:
            self._out.append(removed(gone, event.tier))
