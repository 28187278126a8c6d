"""What a sequence number of an engine's stream means. No I/O.

The stream counts from 0 in each incarnation of the engine. A fingerprint of the last payload tells
a replay of the same incarnation from one of another that has counted as far by chance.

    NEXT       the one that was expected
    OLD        it came by replay already
    GAP        some are missing before it
    RESTARTED  the live stream went back: another incarnation
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import xxhash


class Verdict(Enum):
    """See the module."""

    NEXT = auto()
    OLD = auto()
    GAP = auto()
    RESTARTED = auto()


class Replayed(Enum):
    """What the first batch of a replay shows."""

    SAME = auto()
    """It begins with the last batch that was taken in, or with the very first."""
    ANOTHER = auto()
    """The engine was started anew."""
    TOO_LATE = auto()
    """What came before is not kept any more."""


@dataclass(slots=True)
class Continuity:
    """Position in one rank's stream."""

    last: int = -1
    """Last batch taken in; -1: none."""
    print: int = 0
    """Fingerprint of its payload."""
    live: int = -1
    """Last batch that came on the live stream, taken in or not."""

    def judge(self, seq: int) -> Verdict:
        """What a batch of the live stream is; it counts as seen."""
        went_back, self.live = seq <= self.live, seq
        if went_back:
            return Verdict.RESTARTED
        if seq <= self.last:
            return Verdict.OLD
        return Verdict.NEXT if seq == self.last + 1 else Verdict.GAP

    def take(self, seq: int, payload: bytes) -> None:
        """A batch was taken in."""
        self.last, self.print = seq, xxhash.xxh3_64_intdigest(payload)

    def ask_from(self) -> int:
        """Where a replay should begin: with the last one known, to recognise it."""
        return max(0, self.last)

    def begin_replay(self, seq: int, payload: bytes) -> Replayed:
        """The first batch of a replay from :meth:`ask_from`."""
        if self.last < 0:
            return Replayed.SAME if seq == 0 else Replayed.TOO_LATE
        if seq > self.last:
            return Replayed.TOO_LATE
        same = seq == self.last and xxhash.xxh3_64_intdigest(payload) == self.print
        return Replayed.SAME if same else Replayed.ANOTHER

    def restart(self) -> None:
        """Another incarnation: from nothing."""
        self.last, self.print, self.live = -1, 0, -1
