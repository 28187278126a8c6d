"""Adapters of the worker without torch."""

from __future__ import annotations

from worker.adapterfiles import read_folder
from worker.adapterstore import ReadAdapter
from worker.runner import RunnerError


class FakeAdapters:
    """Implements ``worker.adapterstore.AdapterStore``: real folders, of which only the digest
    counts. Tokens differ from adapter to adapter, and KV too."""

    def __init__(self, max_rank: int) -> None:
        self._max_rank = max_rank
        self.installed: dict[str, ReadAdapter] = {}

    def read(self, folder: str) -> ReadAdapter:
        """Config and fingerprint are checked as for a real model, shapes are not."""
        files = read_folder(folder, self._max_rank)
        spec = files.spec
        return ReadAdapter(
            files.revision, spec.max_rank(), len(files.weights), spec.base_model_name_or_path or ""
        )

    def install(self, scope: str, adapter: ReadAdapter) -> None:
        """Make it usable."""
        self.installed[scope] = adapter

    def remove(self, scope: str) -> None:
        """Let it go."""
        del self.installed[scope]

    def seed(self, scope: str) -> bytes:
        """What it mixes into the KV of each token. Raises ``RunnerError`` if it is not there."""
        if not scope:
            return b""
        if scope not in self.installed:
            raise RunnerError(f"adapter {scope} is not installed")
        return self.installed[scope].revision.encode()
