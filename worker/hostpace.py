"""Whether the host tier pays: the measured time to load a block against that to compute it.

The rule: blocks move while loading one is quicker than computing one at the measured prefill pace,
and as long as either is not known. Otherwise the tier is closed. A closed tier measures nothing, so
after ``RETRY_STEPS`` steps its old figure is forgotten and it gets another chance.
"""

from __future__ import annotations

RETRY_STEPS = 1_000

HALF_LIFE_BLOCKS = 64
"""A measured copy counts half after so many more blocks."""


class HostPace:
    """Learns the pace of copies. Mutable: the average, and how long the tier has been closed."""

    def __init__(self) -> None:
        self._blocks = 0.0
        self._seconds = 0.0
        self._closed_for = 0

    @property
    def s_per_block(self) -> float:
        """Seconds to copy one block; 0 = not measured yet."""
        return self._seconds / self._blocks if self._blocks else 0.0

    @property
    def blocks_per_s(self) -> float:
        """0 = not measured yet."""
        return self._blocks / self._seconds if self._seconds else 0.0

    def observe(self, blocks: int, seconds: float) -> None:
        """A step copied so many blocks."""
        if blocks:
            keep = 0.5 ** (blocks / HALF_LIFE_BLOCKS)
            self._blocks = keep * self._blocks + blocks
            self._seconds = keep * self._seconds + seconds

    def pays(self, compute_s_per_block: float) -> bool:
        """Whether blocks should move in the step that begins; call once per step."""
        if not compute_s_per_block or self.s_per_block < compute_s_per_block:
            self._closed_for = 0
            return True
        self._closed_for += 1
        if self._closed_for < RETRY_STEPS:
            return False
        self._blocks = self._seconds = 0.0
        self._closed_for = 0
        return True
