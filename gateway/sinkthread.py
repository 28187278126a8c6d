"""A bounded queue and the thread that empties it: how records reach files off the hot path."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")

_LAZY = 5
"""Where nothing came for a while, this many times the usual time between two looks."""
_SLICE = 128
"""Items written between two chances for other threads to run."""


class SinkThread(Generic[T]):
    """Hands what was ``put`` to ``write``, in order, a slice at a time.

    :param write: called in the thread, or in the caller of :meth:`flush` and :meth:`close`, never
        twice at once; also with nothing, so that it can say what it still has to say.
    :param limit: items that may wait.
    :param flush_s: seconds between two looks; up to :data:`_LAZY` times that after a silence.
    """

    def __init__(
        self, name: str, write: Callable[[list[T]], None], *, limit: int, flush_s: float
    ) -> None:
        self.overflowed = 0
        """Items that found the queue full or the sink closed."""
        self._write = write
        self._limit = limit
        self._flush_s = flush_s
        self._queue: deque[T] = deque()
        self._writing = Lock()
        self._stop, self._closed = Event(), False
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, item: T) -> None:
        """Take one item; never blocks, never raises. Call from one thread (the event loop)."""
        if len(self._queue) >= self._limit or self._closed:
            self.overflowed += 1
        else:
            self._queue.append(item)

    def flush(self) -> None:
        """Write all that was put before the call. Blocks: call it off the event loop."""
        with self._writing:
            for _ in range(-(-len(self._queue) // _SLICE) or 1):
                queue = self._queue
                self._write([queue.popleft() for _ in range(min(len(queue), _SLICE))])

    def close(self) -> bool:
        """Write the rest and stop the thread; False: that had been done before."""
        if self._stop.is_set():
            return False
        self._closed = True
        self._stop.set()
        self._thread.join()
        self.flush()
        return True

    def _run(self) -> None:
        wait_s = self._flush_s
        while not self._stop.wait(wait_s):
            # Where nothing comes it looks less often: a thread that wakes takes the others' time.
            wait_s = self._flush_s if self._queue else min(2 * wait_s, _LAZY * self._flush_s)
            self.flush()
