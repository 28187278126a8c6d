"""The ledger as a Redis stream, for gateways on several machines: one bounded stream for all.

    LedgerStream.record -> bounded queue -> thread, each 0.5 s -> XADD MAXLEN ~ n

Each entry is one ledger line, as it would stand in a file. While Redis is away some lines wait;
beyond that they are counted as dropped, and the count goes into the stream when it is back. An
addition whose answer was lost is made again, so that readers leave out what is there twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import structlog

from gateway.ledger import QUEUE_RECORDS, derived_salt
from gateway.ledgerline import encode_dropped, encode_record
from gateway.records import RequestRecord
from gateway.sinkthread import SinkThread
from shared.rediskeys import LEDGER_FIELD, LEDGER_TTL_MS, Command, RedisKeys
from shared.redislink import RedisLink, RedisLost

FLUSH_S = 0.5
WAITING_LINES = 20_000
"""Some 8 MB, kept while Redis is away."""
PAUSE_S = 1.0
"""After a failure nothing is tried for so long, or the thread would only wait."""
_BATCH = 500
_PAGE = 2_000


class LedgerStream:
    """A record sink; one per gateway process."""

    def __init__(
        self,
        url: str,
        deployment: str,
        secret: bytes,
        keep: int,
        *,
        timeout_s: float = 0.5,
        clock: Callable[[], float] = time.time,
        flush_s: float = FLUSH_S,
    ) -> None:
        """Start the thread; connects to nothing yet.

        :param secret: keys the hashes, the same in all gateways; not empty.
        :param keep: entries the stream is trimmed to, about.
        """
        self._link = RedisLink(url, timeout_s, "headwater-ledger")
        self._key = RedisKeys(deployment).ledger()
        self._salt, self._keep, self._clock = derived_salt(secret), keep, clock
        self._waiting: list[bytes] = []
        self._lost = 0
        self._told = 0
        self._failing = False
        self._pause_until = 0.0
        self._log = structlog.get_logger("headwater.ledger")
        self._runner = asyncio.Runner()  # in the writer thread only, once it runs
        self._thread = SinkThread[RequestRecord](
            "headwater-ledger-stream", self._write, limit=QUEUE_RECORDS, flush_s=flush_s
        )
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that found no room while Redis was away."""
        return self._thread.overflowed + self._lost

    def record(self, record: RequestRecord) -> None:
        """Take one record; never blocks, never raises. Call from one thread (the event loop)."""
        self._thread.put(record)

    def close(self) -> None:
        """Send the rest if Redis is there, stop the thread; a second call does nothing. Blocks."""
        if self._thread.close():
            self._runner.run(self._link.drop())
            self._runner.close()

    def _write(self, records: list[RequestRecord]) -> None:
        self._waiting += [encode_record(record, self._salt) for record in records]
        excess = len(self._waiting) - WAITING_LINES
        if excess > 0:
            del self._waiting[:excess]
            self._lost += excess
        untold = self.dropped - self._told
        if time.monotonic() < self._pause_until or not (self._waiting or untold):
            return
        lines = self._waiting[:_BATCH]
        if untold:
            lines.append(encode_dropped(self._clock(), untold))
        try:
            self._runner.run(self._add(lines))
        except RedisLost as error:
            self._pause_until = time.monotonic() + PAUSE_S
            self._say(str(error))
            return
        self._told += untold
        del self._waiting[: len(lines) - bool(untold)]
        self._say("")

    async def _add(self, lines: list[bytes]) -> None:
        trim = ("MAXLEN", "~", self._keep)
        commands: list[Command] = [
            ("XADD", self._key, *trim, "*", LEDGER_FIELD, line.rstrip(b"\n")) for line in lines
        ]
        commands.append(("PEXPIRE", self._key, LEDGER_TTL_MS))
        await self._link.transact(commands)

    def _say(self, problem: str) -> None:
        """One log line when it begins to fail and one when it works again."""
        if problem and not self._failing:
            self._log.warning("ledger_stream_failed", reason=problem)
        elif not problem and self._failing:
            self._log.info("ledger_stream_works_again", dropped=self.dropped)
        self._failing = bool(problem)


def read_stream(url: str, deployment: str, *, timeout_s: float = 5.0) -> Iterator[bytes]:
    """The lines of a deployment's stream, oldest first, each once. Blocks; opens a loop of its own.

    :raises RedisLost: Redis cannot be used.
    :raises ConfigError: the URL is none.
    """
    link, key = RedisLink(url, timeout_s, "headwater-report"), RedisKeys(deployment).ledger()
    seen: set[int] = set()
    begin = b"-"
    with asyncio.Runner() as runner:
        try:
            while True:
                command: Command = ("XRANGE", key, begin, "+", "COUNT", _PAGE)
                (entries,) = runner.run(link.call([command]))
                if isinstance(entries, Exception):
                    raise RedisLost(str(entries))
                for _, fields in entries:
                    line = fields[1]
                    if (mark := hash(line)) not in seen:
                        seen.add(mark)
                        yield line
                if len(entries) < _PAGE:
                    return
                begin = b"(" + entries[-1][0]
        finally:
            runner.run(link.drop())
