"""Who runs, who waits, and who has to make way. No I/O, no torch, no clock.

- Only running sequences hold blocks. A sequence starts when blocks for all its tokens are there,
  plus one for each sequence that runs already, so nobody runs that could not go on.
- A decode that finds no block preempts the last in rank (highest ``priority`` number, youngest).
  The first in rank is never preempted by another, so it always ends, and then the next one does.
- A waiting sequence that finds no block or no place preempts less urgent running ones, if that is
  enough to start it; before anything is planned, so nobody loses what this step computes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from shared.paging import BlockPool
from worker.outcome import Counters
from worker.seqblocks import SequenceBlocks
from worker.sequence import Phase, Sequence
from worker.siblings import Siblings


class Roster:
    """All sequences of a scheduler, and their blocks.

    :param max_running: so many run at most.
    :param counters: are told of preemptions, and of what was found in the cache.
    """

    def __init__(self, pool: BlockPool, max_running: int, counters: Counters) -> None:
        self.blocks = SequenceBlocks(pool)
        self.known: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        """By rank."""
        self._max_running = max_running
        self._arrivals = 0
        self._counters = counters

    def enqueue(self, seq: Sequence) -> None:
        """A new sequence waits behind those of its priority."""
        self._arrivals += 1
        seq.order = self._arrivals
        seq.urgency = seq.priority
        self.known[seq.id] = seq
        self.blocks.enrol(seq)
        self.blocks.match(seq)
        insort(self.waiting, seq, key=rank_of)

    def remove(self, seq_id: str) -> Sequence | None:
        """A sequence leaves, and its blocks are free; None if it is not here."""
        seq = self.known.pop(seq_id, None)
        if seq is None:
            return None
        if self.running.pop(seq_id, None) is None:
            self.waiting.remove(seq)
        self.blocks.dismiss(seq)
        return seq

    def prefills(self) -> Iterator[Sequence]:
        """Running ones that have more than their newest token to compute."""
        return (seq for seq in self.running.values() if seq.prefilling)

    def start(self, seq: Sequence) -> bool:
        """Let a waiting sequence run; False, and no change, if there is no space for it.

        It stays in the queue until :meth:`tidy`, since the caller may be walking through that.
        """
        full = len(self.running) >= self._max_running
        if full or not self.blocks.take(seq, spare=len(self.running)):
            return False
        seq.phase = Phase.RUNNING
        self.running[seq.id] = seq
        if seq.cached is None:
            seq.cached = seq.computed
            self._counters.cached_tokens += seq.computed
            self._counters.host_tokens += seq.loaded
        return True

    def tidy(self) -> None:
        """Take those that have started out of the queue."""
        if len(self.waiting) + len(self.running) > len(self.known):
            self.waiting = [seq for seq in self.waiting if seq.phase is Phase.WAITING]

    def held_back(self, seq: Sequence, siblings: Siblings) -> bool:
        """Whether a waiting sequence should wait for the prefix that another one computes."""
        if siblings.still_held(seq):
            return True
        held = siblings.hold_back(seq)
        self._counters.held_back += held
        return held

    def make_room(self, seq: Sequence, *, preempt: bool) -> bool:
        """Give a decode the block of its newest token; False if it must not run now.

        With ``preempt`` decodes must be visited by rank, so that whoever is last in rank is not in
        the plan yet.
        """
        while not self.blocks.grow(seq):
            if not preempt:
                return False
            victim = max(self.running.values(), key=rank_of)
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def make_way(self) -> None:
        """Start the first in the queue at the cost of less urgent running sequences, if there is no
        other way. Call while nobody is in the plan, so that nobody's work is lost."""
        if not self.waiting:
            return
        worst = max(self.running.values(), key=rank_of, default=None)
        if worst is None or worst.priority <= self.waiting[0].priority:
            return
        siblings = Siblings(self.blocks, self.running.values())
        able = (seq for seq in self.waiting if not self.held_back(seq, siblings))
        seq = next(able, None)
        victims = [] if seq is None else self._victims_for(seq)
        if seq is None or not victims:
            return
        for victim in victims:
            self.preempt(victim)
        if self.start(seq):
            self.waiting.remove(seq)

    def _victims_for(self, seq: Sequence) -> list[Sequence]:
        """Less urgent running sequences, the last in rank first, without which a waiting one could
        start; empty if it can start anyway, or if it would not help."""
        less_urgent = [each for each in self.running.values() if each.urgency > seq.priority]
        less_urgent.sort(key=rank_of)
        victims: list[Sequence] = []
        while not self._fits(seq, victims):
            if not less_urgent:
                return []
            victims.append(less_urgent.pop())
        return victims

    def _fits(self, seq: Sequence, without: list[Sequence]) -> bool:
        """Whether a waiting sequence could start if some running ones were preempted."""
        others = len(self.running) - len(without)
        return others < self._max_running and self.blocks.fits(seq, others, without)

    def preempt(self, seq: Sequence) -> None:
        """Back to the queue, at its old place; its sealed blocks stay reusable."""
        del self.running[seq.id]
        self.blocks.give_back(seq)
        seq.phase = Phase.WAITING
        seq.urgency = seq.priority
        seq.preemptions += 1
        self._counters.preemptions += 1
        insort(self.waiting, seq, key=rank_of)

    def check(self) -> None:
        """Prove the invariants between two steps; raises AssertionError. O(pool + sequences)."""
        self.blocks.check(list(self.running.values()), self.waiting)
        if self.waiting != sorted(self.waiting, key=rank_of):
            raise AssertionError("the queue is out of order")
        if len(self.known) != len(self.running) + len(self.waiting):
            raise AssertionError("a sequence is lost")


def rank_of(seq: Sequence) -> tuple[int, int]:
    """Who goes first; for sorting."""
    return seq.rank
