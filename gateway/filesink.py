"""What goes to a file of a gateway's own off the hot path: a queue, its thread, and the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from gateway.ledgerfile import LedgerFile
from gateway.sinkthread import SinkThread

T = TypeVar("T")


class FileSink(ABC, Generic[T]):
    """Those that write put items into ``_thread``, which hands them to :meth:`_write`.

    Everything that can block happens in the thread, or in the caller of :meth:`flush` and
    :meth:`close`.
    """

    def __init__(self, name: str, file: LedgerFile, *, limit: int, flush_s: float) -> None:
        """The thread begins: whatever :meth:`_write` needs must be there.

        :param limit: items that may wait.
        :param flush_s: seconds between two looks at the queue.
        """
        self._file = file
        self._unwritten = 0
        """Items that could not be written."""
        self._told = 0
        """Dropped items that somebody has been told of."""
        self._thread = SinkThread[T](name, self._write, limit=limit, flush_s=flush_s)
        self._thread.start()

    @abstractmethod
    def _write(self, items: list[T]) -> None:
        """Write these, in order, and count what cannot be; see :class:`SinkThread`."""

    @property
    def dropped(self) -> int:
        """Items that found the queue full or could not be written."""
        return self._thread.overflowed + self._unwritten

    @property
    def path(self) -> Path:
        """The file being written now."""
        return self._file.path

    def flush(self) -> None:
        """Write all that was taken before the call. Blocks: call it off the event loop."""
        self._thread.flush()

    def close(self) -> None:
        """Write the rest, stop the thread, close the file; a second call does nothing. Blocks."""
        if self._thread.close():
            self._file.close()
