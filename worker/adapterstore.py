"""The seam between which adapters are served and how a runner computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter that was read and fits the model; a store's own class adds its weights."""

    revision: str
    rank: int
    """Largest rank."""
    n_bytes: int
    """Memory its weights take."""
    base: str
    """Model it says it was trained on; empty if it does not say."""


class AdapterStore(Protocol):
    """A runner's adapters; ``scope`` is :attr:`shared.load.AdapterInfo.scope`."""

    def read(self, folder: str) -> ReadAdapter:
        """Read and check a folder. Any thread. Raises ``AdapterRefused``."""
        ...

    def install(self, scope: str, adapter: ReadAdapter) -> None:
        """Make it usable. Engine thread, between two steps."""
        ...

    def remove(self, scope: str) -> None:
        """Let it go; no sequence uses it any more. Engine thread, between two steps."""
        ...
