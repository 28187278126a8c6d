"""When a worker that fails rests: 3 failures in its last 10 attempts, longer each time.

The pause doubles from 5 s to at most 60 s. When it is over, one probe request decides. Whether the
fleet can do without the worker is not decided here.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

_WINDOW = 10
_LIMIT = 3
_PAUSE_S = 5.0
_MAX_PAUSE_S = 60.0


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
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self.failure_rate = 0.0
        """Share of failures in the last attempts, 0..1, as if there had been ten."""
        self._until: float | None = None
        self._probing = False
        self._pauses = 0

    @property
    def closed(self) -> bool:
        """Requests pass as usual."""
        return self._until is None

    def gate(self, now: float) -> Gate:
        """Pure."""
        if self._until is None:
            return Gate.CLOSED
        if now < self._until or self._probing:
            return Gate.OPEN
        return Gate.HALF_OPEN

    def begin(self, now: float) -> bool:
        """An attempt begins; True: it is the probe, and must be ended as such."""
        if self.gate(now) is not Gate.HALF_OPEN:
            return False
        self._probing = True
        return True

    def succeed(self, *, probe: bool) -> None:
        """The worker answered (a 4xx is an answer)."""
        self._note(False)
        if probe:
            self._until = None
            self._probing = False
        if len(self._recent) == _WINDOW and not any(self._recent):
            self._pauses = 0

    def fail(self, now: float, *, probe: bool, may_eject: bool) -> None:
        """The worker failed an attempt; ``may_eject``: the fleet can do without it."""
        self._note(True)
        if probe:
            self._probing = False
            self._rest(now)
        elif self._until is None and sum(self._recent) >= _LIMIT and may_eject:
            self._rest(now)

    def give_up(self, *, probe: bool) -> None:
        """The attempt ended without saying anything about the worker."""
        if probe:
            self._probing = False

    def reset(self) -> None:
        """A new incarnation starts with a clean record."""
        self._clear()
        self._until, self._probing, self._pauses = None, False, 0

    def _rest(self, now: float) -> None:
        self._until = now + min(_MAX_PAUSE_S, _PAUSE_S * 2.0**self._pauses)
        self._pauses += 1
        self._clear()

    def _note(self, failed: bool) -> None:
        self._recent.append(failed)
        self.failure_rate = sum(self._recent) / _WINDOW

    def _clear(self) -> None:
        self._recent.clear()
        self.failure_rate = 0.0
