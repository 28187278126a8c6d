"""What operators changed since the start, to be told to each process that starts later. Pure.

A process that is started anew reads the configuration, which knows nothing of that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One request that changes the workers."""

    method: str
    path: str
    body: bytes | None
    worker: str
    action: str
    """``add``, ``remove``, ``drain`` or ``undrain``."""


class Changes:
    """The last word about each worker: whether it is there, and whether it is drained."""

    def __init__(self) -> None:
        self._there: dict[str, Change] = {}
        self._drained: dict[str, Change] = {}

    def note(self, change: Change) -> None:
        """It was done."""
        if change.action in ("add", "remove"):
            self._there.pop(change.worker, None)  # the latest comes last
            self._there[change.worker] = change
            self._drained.pop(change.worker, None)
        elif change.action == "drain":
            self._drained[change.worker] = change
        else:
            self._drained.pop(change.worker, None)

    def all(self) -> list[Change]:
        """In the order in which they are to be done."""
        return [*self._there.values(), *self._drained.values()]
