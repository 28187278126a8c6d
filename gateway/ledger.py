"""The ledger: one line of JSON per attempt, written off the hot path, append-only, mode 0600.

    LedgerSink.record -> bounded queue -> writer thread, each 0.2 s -> LedgerFile (rotate, prune)

Nothing is lost silently: what does not fit the queue or cannot be written is counted, and the
count goes into the ledger itself (a line ``{"at": ..., "dropped": n}``) as soon as it can be
written. A line never holds prompt text: its fields are those of ``RequestRecord`` and nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Lock, Thread

import msgspec
import structlog

from gateway.config import LedgerConfig
from gateway.ledgerfile import LedgerFile
from gateway.records import Outcome, RequestRecord, TokenFlow

FLUSH_S = 0.2
QUEUE_RECORDS = 65_536
"""About 20 MB of records at most; beyond it they are counted as dropped."""
NAME_CHARS = 120
"""Longest name kept: clients choose some of them (the model), and a line has to stay short."""
_SLICE = 128
"""Records encoded between two chances for other threads to run."""

_SHORTER = {
    "available": "avail",
    "diverted_for_load": "load",
    "stale_index": "stale",
    "token_mismatch": "mismatch",
}
FLOW_KEYS = {name: _SHORTER.get(name, name) for name in TokenFlow.__struct_fields__}
"""Field of ``TokenFlow`` -> its key in a line's ``flow``."""
_FLOW_NAMES = {key: name for name, key in FLOW_KEYS.items()}


class Dropped(msgspec.Struct, frozen=True):
    """A line that says how many records could not be kept before ``at``."""

    at: float
    dropped: int


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record as it stands in the file; ``report/query.py`` reads these names in SQL.

    The defaults are the usual values, which are not written.
    """

    at: float
    id: str
    attempt: int = msgspec.field(default=1, name="try")
    final: bool = True
    route: str
    model: str
    tenant: str = ""
    family: str = ""
    policy: str = ""
    worker: str = ""
    trust: str = ""
    outcome: Outcome = Outcome.OK
    status: int = 200
    flow: dict[str, int] = {}
    """The terms of ``TokenFlow`` that are not 0."""
    out: int = 0
    decided_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    itl_s: float | None = None
    predicted_ttft_s: float | None = msgspec.field(default=None, name="predicted_s")
    reported: bool = True


_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(LedgerLine).decode
_decode_dropped = msgspec.json.Decoder(Dropped).decode


def default_dir(env: Mapping[str, str]) -> Path:
    """Where ``headwater up`` keeps its ledger and ``headwater report`` looks for one."""
    state = Path(env.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # unset, or relative, which the XDG specification says to ignore
        state = Path(env["HOME"] if env.get("HOME") else Path.home()) / ".local" / "state"
    return state / "headwater" / "ledger"


def _short(name: str) -> str:
    """A name as UTF-8 can carry it (clients can send lone surrogates), and not too long."""
    if not name.isascii():
        name = name.encode("utf-8", "replace").decode()
    return name if len(name) <= NAME_CHARS else name[: NAME_CHARS - 1] + "…"


def _fine(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)


def encode_record(record: RequestRecord) -> bytes:
    """One line with its newline. Durations are rounded to some 10 us, the arrival to 1 ms."""
    flow = {key: n for name, key in FLOW_KEYS.items() if (n := getattr(record.flow, name))}
    return (
        _encode(
            LedgerLine(
                at=round(record.at, 3),
                id=_short(record.request_id),
                attempt=record.attempt,
                final=record.final,
                route=_short(record.route),
                model=_short(record.model),
                tenant=_short(record.tenant),
                family=_short(record.family),
                policy=_short(record.policy),
                worker=_short(record.worker),
                trust=record.trust,
                outcome=record.outcome,
                status=record.status,
                flow=flow,
                out=record.output_tokens,
                decided_s=round(record.decided_s, 6),
                ttft_s=_fine(record.ttft_s),
                total_s=round(record.total_s, 4),
                itl_s=_fine(record.itl_s),
                predicted_ttft_s=_fine(record.predicted_ttft_s),
                reported=record.reported,
            )
        )
        + b"\n"
    )


def decode_record(line: bytes) -> RequestRecord | Dropped:
    """Inverse of :func:`encode_record`.

    :raises msgspec.DecodeError: the line is not JSON (torn, garbled).
    :raises msgspec.ValidationError: it is JSON, but no record (a subclass of the former).
    """
    try:
        read = _decode_line(line)
    except msgspec.ValidationError:
        if b'"dropped":' not in line:
            raise
        return _decode_dropped(line)
    unknown = read.flow.keys() - _FLOW_NAMES.keys()
    if unknown:
        raise msgspec.ValidationError(f"Object has unknown flow terms {sorted(unknown)}")
    return RequestRecord(
        at=read.at,
        request_id=read.id,
        attempt=read.attempt,
        final=read.final,
        route=read.route,
        model=read.model,
        tenant=read.tenant,
        family=read.family,
        policy=read.policy,
        worker=read.worker,
        trust=read.trust,
        outcome=read.outcome,
        status=read.status,
        flow=TokenFlow(**{_FLOW_NAMES[key]: tokens for key, tokens in read.flow.items()}),
        output_tokens=read.out,
        decided_s=read.decided_s,
        ttft_s=read.ttft_s,
        total_s=read.total_s,
        itl_s=read.itl_s,
        predicted_ttft_s=read.predicted_ttft_s,
        reported=read.reported,
    )


class LedgerSink:
    """Keeps records in the files of ``config.dir``; one per gateway process.

    ``record`` only appends to a queue. Everything that can block happens in the writer thread, or
    in the caller of :meth:`flush` and :meth:`close`.
    """

    def __init__(
        self,
        config: LedgerConfig,
        instance: str,
        *,
        clock: Callable[[], float] = time.time,
        queue_records: int = QUEUE_RECORDS,
        flush_s: float = FLUSH_S,
    ) -> None:
        """Create the folder, open a file, start the writer.

        :param instance: name of this process among those that share the folder, the same after a
            restart (its public port, for one): a restarted gateway goes on in its newest file.
        :raises ConfigError: the folder cannot be made or written.
        """
        self.written = 0
        """Records handed to the operating system."""
        self._overflowed = 0
        self._unwritten = 0
        self._told = 0
        self._limit = queue_records
        self._flush_s = flush_s
        self._clock = clock
        self._queue: deque[RequestRecord] = deque()
        self._log = structlog.get_logger("headwater.ledger")
        self._failing = False
        self._file = LedgerFile.open(
            config.dir, instance, int(config.rotate_mib * 2**20), config.keep_files, clock
        )
        self._draining = Lock()
        self._stop = Event()
        self._writer = Thread(target=self._run, name="headwater-ledger", daemon=True)
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Records that found the queue full or could not be written."""
        return self._overflowed + self._unwritten

    @property
    def path(self) -> Path:
        """The file being written now."""
        return self._file.path

    def record(self, record: RequestRecord) -> None:
        """Take one record; never blocks, never raises. Call from one thread (the event loop)."""
        if len(self._queue) >= self._limit or self._stop.is_set():
            self._overflowed += 1
        else:
            self._queue.append(record)

    def flush(self) -> None:
        """Write all that was recorded before the call. Blocks: call it off the event loop."""
        with self._draining:
            for _ in range(-(-len(self._queue) // _SLICE) or 1):
                self._write_slice()

    def close(self) -> None:
        """Write the rest, stop the thread, close the file; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._writer.join()
        self.flush()
        self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(self._flush_s):
            self.flush()

    def _write_slice(self) -> None:
        queue = self._queue
        records = [queue.popleft() for _ in range(min(len(queue), _SLICE))]
        lines = [encode_record(record) for record in records]
        untold = self.dropped - self._told
        if untold:
            lines.append(_encode(Dropped(at=round(self._clock(), 3), dropped=untold)) + b"\n")
        if not lines:
            return
        kept, error = self._file.write(lines)
        self.written += min(kept, len(records))
        if kept == len(lines):
            self._told += untold
        else:
            self._unwritten += max(0, len(records) - kept)
        self._say(error)

    def _say(self, error: OSError | None) -> None:
        """One log line when writing begins to fail and one when it works again."""
        if error is not None and not self._failing:
            self._log.warning("ledger_write_failed", path=str(self.path), reason=error.strerror)
        elif error is None and self._failing:
            self._log.info("ledger_writes_again", path=str(self.path), dropped=self.dropped)
        self._failing = error is not None
