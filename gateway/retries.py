"""When a further attempt is allowed: generous when some workers fail, mean in a total outage."""

from __future__ import annotations

FREE = 64
"""Retries allowed in a row without any success in between, at least."""

SHARE = 0.1
"""Beyond that, retries per request."""


class RetryBudget:
    """Bounds what retries add to the load of a fleet that answers nothing.

    While answers succeed, each failed attempt may be retried: a dying worker costs no request. Once
    nothing has succeeded for ``max(FREE, requests in flight)`` retries, a tenth of the requests may
    still be retried, so that a fleet that struggles back is not met by a multiple of its load.
    """

    def __init__(self) -> None:
        self._since_success = 0
        self._credit = 0.0

    def request(self) -> None:
        """A request came in."""
        self._credit = min(1.0, self._credit + SHARE)

    def success(self) -> None:
        """A worker answered."""
        self._since_success = 0

    def take(self, inflight: int) -> bool:
        """Whether one more attempt may be made; if so it is counted."""
        if self._since_success < max(FREE, inflight):
            self._since_success += 1
            return True
        if self._credit >= 1.0:
            self._credit -= 1.0
            return True
        return False
