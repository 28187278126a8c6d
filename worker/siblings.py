"""Requests that share a prefix which is being computed right now: the prefix is computed once.

A running sequence's *frontier* is the first full block of its tokens that it has not sealed: its
parent in the tree and its exact contents. A waiting request whose longest match ends at that
parent, and whose next block has these contents, would compute the same again; it is held back until
the running one has sealed all the blocks both have in common, or has stopped running.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker.seqblocks import SequenceBlocks
from worker.sequence import Phase, Sequence


class Siblings:
    """Frontiers of the running sequences, for the length of one plan."""

    def __init__(self, blocks: SequenceBlocks, running: Iterable[Sequence]) -> None:
        self._blocks = blocks
        self._frontiers: dict[tuple[int | bytes, bytes], Sequence] = {}
        for seq in running:
            self.add(seq)

    def add(self, seq: Sequence) -> None:
        """Note the frontier of a running sequence."""
        units = self._blocks.units(seq)
        if self._blocks.pool.caching and seq.sealed < len(units):
            above = seq.blocks[seq.sealed - 1] if seq.sealed else seq.scope_root
            self._frontiers.setdefault((above, units[seq.sealed]), seq)

    def still_held(self, seq: Sequence) -> bool:
        """Whether the reason for which ``seq`` was held back persists; O(1)."""
        owner = seq.held_by
        if owner is None:
            return False
        if owner.phase is Phase.RUNNING and owner.sealed < seq.held_until:
            owner.urgency = min(owner.urgency, seq.urgency)
            return True
        owner.urgency = owner.priority  # whoever still waits for it says so in the next plan
        seq.held_by = None
        return False

    def hold_back(self, seq: Sequence) -> bool:
        """Hold ``seq`` back if its next reusable block is some running sequence's frontier.

        The owner becomes as urgent as the request that waits for it.
        """
        if not self._frontiers:
            return False
        limit = self._blocks.limit(seq)
        matched, slots = self._blocks.match(seq)
        common = len(matched)
        if slots or common >= limit:
            return False
        units = self._blocks.units(seq)
        above = matched[-1] if matched else seq.scope_root
        owner = self._frontiers.get((above, units[common]))
        if owner is None:
            return False
        theirs = self._blocks.units(owner)
        while common < min(limit, len(theirs)) and units[common] == theirs[common]:
            common += 1
        seq.held_by, seq.held_until = owner, common
        owner.urgency = min(owner.urgency, seq.urgency)
        return True
