"""A check that now and then runs beside a live request: sampled, one at a time, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

Background = Callable[[Callable[[], None]], object]
"""Runs a piece of work somewhere else, soon."""


def on_own_thread(work: Callable[[], None]) -> None:
    """The usual background: a daemon thread that lives as long as the work."""
    threading.Thread(target=work, name="headwater-check", daemon=True).start()


class LiveCheck:
    """Any thread may offer.

    :param every: one in so many offers is taken.
    """

    def __init__(self, every: int, background: Background) -> None:
        self._every, self._background = every, background
        self._offers = 0
        self._running = False
        self._lock = threading.Lock()
        self.done = 0
        """Checks that have ended."""
        self.mismatches = 0
        """Checks that found a difference."""

    def offer(self, compare: Callable[[], bool], differs: Callable[[], None]) -> None:
        """Perhaps run ``compare`` in the background, and ``differs`` there if it is False."""
        with self._lock:
            self._offers += 1
            if self._offers % self._every or self._running:
                return
            self._running = True
        self._background(lambda: self._run(compare, differs))

    def _run(self, compare: Callable[[], bool], differs: Callable[[], None]) -> None:
        try:
            equal = compare()
            if not equal:
                differs()
            with self._lock:
                self.done += 1
                self.mismatches += not equal
        finally:
            with self._lock:
                self._running = False
