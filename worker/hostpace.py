"""Whether the host tier pays: the measured time that a loaded block costs against computing it.

The rule: blocks move while ``copy * (2 + dropped / loaded) < compute``, and as long as one of the
times is not known. A loaded block was copied twice, and some were copied out that are dropped
before anybody asks for them; what is still there has no fate yet and does not count. Otherwise the
tier is closed. A closed tier measures nothing, so after ``RETRY_STEPS`` steps all figures are
forgotten and it gets another chance.
"""

from __future__ import annotations

RETRY_STEPS = 1_000

HALF_LIFE_BLOCKS = 64
"""A measured copy counts half after so many more blocks."""

HALF_LIFE_FATES = 4_096
"""Whether a block was loaded or dropped counts half after so many more blocks."""

TRUSTED = 64.0
"""Blocks that count as loaded in advance, so that the first drop says little."""


class HostPace:
    """Learns pace and use of copies. Mutable: the averages, and how long the tier was closed."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._blocks = self._seconds = 0.0
        self._loaded, self._dropped = TRUSTED, 0.0
        self._closed_for = 0

    @property
    def blocks_per_s(self) -> float:
        """Measured rate of copies; 0 = not measured yet."""
        return self._blocks / self._seconds if self._seconds else 0.0

    @property
    def s_per_load(self) -> float:
        """What a loaded block costs in all; 0 = not measured yet."""
        copies = 2.0 + self._dropped / self._loaded
        return copies * self._seconds / self._blocks if self._blocks else 0.0

    def observe(self, copied: int, seconds: float, loaded: int, dropped: int) -> None:
        """A step copied so many blocks; of those copied out earlier, some have met their fate."""
        if copied:
            keep = 0.5 ** (copied / HALF_LIFE_BLOCKS)
            self._blocks = keep * self._blocks + copied
            self._seconds = keep * self._seconds + seconds
        keep = 0.5 ** ((loaded + dropped) / HALF_LIFE_FATES)
        self._loaded = max(1.0, keep * self._loaded + loaded)
        self._dropped = keep * self._dropped + dropped

    def pays(self, compute_s_per_block: float) -> bool:
        """Whether blocks should move in the step that begins; call once per step."""
        if not compute_s_per_block or self.s_per_load < compute_s_per_block:
            self._closed_for = 0
            return True
        self._closed_for += 1
        if self._closed_for < RETRY_STEPS:
            return False
        self._forget()
        return True
