"""Keeps the trace file of a gateway: one thread, rotation and pruning as in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from gateway.config import LedgerConfig
from gateway.decision import Route
from gateway.filesink import FileSink
from gateway.ledger import open_salted
from gateway.records import RequestRecord
from gateway.routing.base import Candidate, Query
from gateway.tracefile import FOLDER, WINDOW_KEYS, TraceEncoder

_Item = tuple[Query, RequestRecord, tuple[Candidate, ...]]

FLUSH_S = 0.5
QUEUE_REQUESTS = 8_192
"""Each keeps its prompt's keys alive: 16 KB for 8,000 tokens."""


class TraceSink(FileSink[_Item]):
    """Takes the requests that end, with their keys; one per gateway process."""

    def __init__(
        self,
        config: LedgerConfig,
        instance: str,
        *,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
        flush_s: float = FLUSH_S,
        queue_requests: int = QUEUE_REQUESTS,
        window_keys: int = WINDOW_KEYS,
    ) -> None:
        """Open ``DIR/trace`` and start the writer; arguments as for ``LedgerSink``.

        :raises ConfigError: the folder cannot be made or written.
        """
        folder = str(Path(config.dir) / FOLDER)
        file, salt = open_salted(config, folder, instance, secret, clock)
        # A number from the clock: a restarted gateway goes on in its file without using one twice.
        self._encoder = TraceEncoder(int(clock() * 1e6), salt, window_keys)
        self._log = structlog.get_logger("headwater.trace")
        self._decisions = config.decisions
        super().__init__("headwater-trace", file, limit=queue_requests, flush_s=flush_s)

    def record(self, route: Route | None, record: RequestRecord) -> None:
        """Take a request at its end; what was rejected, has no prompt or is tried again is passed
        over. Never blocks."""
        if route is None or not record.final:
            return
        query = route.query
        if query.keys or query.prompt_tokens:
            seen = tuple(scored.candidate for scored in route.order) if self._decisions else ()
            self._thread.put((query, record, seen))

    def _write(self, items: list[_Item]) -> None:
        lines: list[bytes] = []
        begun = self._file.path
        try:
            room = self._file.room()
            if self._file.path != begun:  # it was removed under us
                self._encoder.restart()
            for query, record, seen in items:
                line = self._encoder.encode(query, record, seen)
                if len(line) > room:
                    self._put(lines)
                    # The line goes to the next file, where nothing of this one may be referred to.
                    self._encoder.restart()
                    line, lines, room = self._encoder.encode(query, record, seen), [], 0
                    self._put([line])
                    room = self._file.room()
                    continue
                lines.append(line)
                room -= len(line)
            self._put(lines)
        except OSError as error:
            self._encoder.restart()
            self._unwritten += len(items)
            self._say(error.strerror or str(error))
        if self._thread.overflowed + self._unwritten > self._told:
            self._say("its queue was full")

    def _put(self, lines: list[bytes]) -> None:
        if not lines:
            return
        _, error = self._file.write(lines)
        if error is not None:
            raise error

    def _say(self, reason: str) -> None:
        if self.dropped > self._told:
            new, self._told = self.dropped - self._told, self.dropped
            self._log.warning("trace_lost", requests=new, path=str(self.path), reason=reason)
