"""The ledger: one line of JSON per attempt, written off the hot path, append-only, mode 0600.

    LedgerSink.record -> bounded queue -> writer thread, each 0.2 s -> LedgerFile (rotate, prune)

Nothing is lost silently: what does not fit the queue or cannot be written is counted, and the
count goes into the ledger itself (a line ``{"at": ..., "dropped": n}``) as soon as it can be
written. A line never holds prompt text: its fields are those of ``ledgerline.py`` and nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes, token_hex

import structlog

from gateway.config import LedgerConfig
from gateway.filesink import FileSink
from gateway.ledgerfile import LedgerFile
from gateway.ledgerline import encode_dropped, encode_record
from gateway.records import RequestRecord
from shared.errors import ConfigError

FLUSH_S = 0.2
SALT_FILE = "salt"
QUEUE_RECORDS = 65_536
"""About 20 MB of records at most; beyond it they are counted as dropped."""


def default_dir(env: Mapping[str, str]) -> Path:
    """Where ``headwater up`` keeps its ledger and ``headwater report`` looks for one."""
    state = Path(env.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # unset, or relative, which the XDG specification says to ignore
        state = Path(env["HOME"] if env.get("HOME") else Path.home()) / ".local" / "state"
    return state / "headwater" / "ledger"


def derived_salt(secret: bytes) -> bytes:
    """The salt of all ledgers of a deployment that has a secret."""
    return blake2b(b"headwater ledger", key=secret[:64], digest_size=16).digest()


def ledger_salt(folder: Path, secret: bytes) -> bytes:
    """16 bytes that key the hashes in a folder's ledgers. Blocks.

    From the deployment's secret where there is one, so that gateways on different machines agree;
    else random, made once and kept in the folder (mode 0600).

    :raises OSError: the folder cannot be written.
    """
    if secret:
        return derived_salt(secret)
    path = folder / SALT_FILE
    fresh = folder / f"{SALT_FILE}.{token_hex(4)}"
    if not path.exists():
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, token_bytes(16))
        finally:
            os.close(fd)
        with suppress(FileExistsError):  # another gateway was faster: its salt holds
            os.link(fresh, path)
        fresh.unlink()
    return path.read_bytes()


def open_salted(
    config: LedgerConfig, folder: str, instance: str, secret: bytes, clock: Callable[[], float]
) -> tuple[LedgerFile, bytes]:
    """An instance's file in a folder, and the salt of the ledger that the folder belongs to.

    :param folder: ``config.dir``, or one in it.
    :raises ConfigError: the folder cannot be made or written.
    """
    limit = int(config.rotate_mib * 2**20)
    file = LedgerFile.open(folder, instance, limit, config.keep_files, clock)
    try:
        return file, ledger_salt(Path(config.dir).expanduser(), secret)
    except OSError as error:
        file.close()
        reason = f"its salt cannot be kept: {error.strerror}"
        raise ConfigError("ledger.dir", config.dir, reason) from error


class LedgerSink(FileSink[RequestRecord]):
    """Keeps records in the files of ``config.dir``; one per gateway process."""

    def __init__(
        self,
        config: LedgerConfig,
        instance: str,
        *,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
        queue_records: int = QUEUE_RECORDS,
        flush_s: float = FLUSH_S,
    ) -> None:
        """Create the folder, open a file, start the writer.

        :param instance: name of this process among those that share the folder, the same after a
            restart (its public port, for one): a restarted gateway goes on in its newest file.
        :param secret: the deployment's, if it has one (see :func:`ledger_salt`).
        :raises ConfigError: the folder cannot be made or written.
        """
        self.written = 0
        """Records handed to the operating system."""
        self._clock = clock
        self._log = structlog.get_logger("headwater.ledger")
        self._failing = False
        file, self._salt = open_salted(config, config.dir, instance, secret, clock)
        super().__init__("headwater-ledger", file, limit=queue_records, flush_s=flush_s)

    def record(self, record: RequestRecord) -> None:
        """Take one record; never blocks, never raises. Call from one thread (the event loop)."""
        self._thread.put(record)

    def _write(self, records: list[RequestRecord]) -> None:
        lines = [encode_record(record, self._salt) for record in records]
        untold = self.dropped - self._told
        if untold:
            lines.append(encode_dropped(self._clock(), untold))
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
