"""When a worker that fails rests: 3 failures in its last 10 attempts, longer each time.

The pause doubles from 5 s to at most 60 s. When it is over, one probe request decides. Whether the
fleet can do without the worker is not decided here.

Fewer failures make a worker dearer for a while only: one that gets no requests because of them
could never prove itself.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from math import exp2

_WINDOW = 10
_LIMIT = 3
_PAUSE_S = 5.0
_MAX_PAUSE_S = 60.0
_HALF_LIFE_S = 2.0
"""After so long a failure weighs half as much in ``failure_rate``."""
_FORGOTTEN = 0.01
"""A lower rate counts as none."""


class Gate(Enum):
    """Whether requests may pass."""

    CLOSED = auto()
    """As usual."""
    OPEN = auto()
    """Resting, or its probe is under way."""
    HALF_OPEN = auto()
    """The pause is over: one request may probe."""


class Breaker:
    """Attempts of one worker and what follows from them."""

    def __init__(self) -> None:
        self._recent: deque[float | None] = deque(maxlen=_WINDOW)
        """When each of the last attempts failed; None: it did not."""
        self.failing = False
        """One of them did."""
        self.lost_s = 0.0
        """Usual time from the begin of an attempt to its failure, seconds."""
        self.until: float | None = None
        """When its pause is over; None: requests pass as usual."""
        self._probing = False
        self._pauses = 0

    def failure_rate(self, now: float) -> float:
        """Share of failures in the last attempts, 0..1, as if there had been ten. Pure."""
        if not self.failing:
            return 0.0
        ages = [max(0.0, now - at) for at in self._recent if at is not None]
        rate = sum(exp2(-age / _HALF_LIFE_S) for age in ages) / _WINDOW
        return rate if rate >= _FORGOTTEN else 0.0

    def gate(self, now: float) -> Gate:
        """Pure."""
        if self.until is None:
            return Gate.CLOSED
        if now < self.until or self._probing:
            return Gate.OPEN
        return Gate.HALF_OPEN

    def begin(self, now: float) -> bool:
        """An attempt begins; True: it is the probe, and must be ended as such."""
        if self.until is None or self.gate(now) is not Gate.HALF_OPEN:
            return False
        self._probing = True
        return True

    def succeed(self, *, probe: bool) -> None:
        """The worker answered (a 4xx is an answer)."""
        self._recent.append(None)
        if self.failing:
            self.failing = self._failures > 0
        if probe:
            self.until = None
            self._probing = False
        if self._pauses and len(self._recent) == _WINDOW and not self._failures:
            self._pauses = 0

    def fail(self, now: float, *, lost_s: float, probe: bool, may_eject: bool) -> None:
        """The worker failed an attempt; ``may_eject``: the fleet can do without it."""
        self.lost_s = (self.lost_s + lost_s) / 2 if self._failures else lost_s
        self._recent.append(now)
        self.failing = True
        if probe:
            self._probing = False
            self._rest(now)
        elif self.until is None and self._failures >= _LIMIT and may_eject:
            self._rest(now)

    def give_up(self, *, probe: bool) -> None:
        """The attempt ended without saying anything about the worker."""
        if probe:
            self._probing = False

    def reset(self) -> None:
        """A new incarnation starts with a clean record."""
        self._recent.clear()
        self.failing = False
        self.until, self._probing, self._pauses = None, False, 0

    @property
    def _failures(self) -> int:
        return len(self._recent) - self._recent.count(None)

    def _rest(self, now: float) -> None:
        self.until = now + min(_MAX_PAUSE_S, _PAUSE_S * 2.0**self._pauses)
        self._pauses += 1
        self._recent.clear()
        self.failing = False
