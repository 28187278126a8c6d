"""The files behind the ledger: names that sort by time, rotation by size, pruning by number.

    20260728T101512.123456Z-<instance>.jsonl

A file in use is locked (``flock``), so that no other process appends to it or prunes it. A write
that was cut short leaves a torn line; the next one starts on a line of its own.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from shared.errors import ConfigError

NAME = re.compile(r"^\d{8}T\d{6}\.\d{6}Z-(?P<instance>[A-Za-z0-9._-]+)\.jsonl(\.gz)?$")


def _lock(fd: int) -> bool:
    """Whether we now hold the file's lock. False where someone has it, or nothing can be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _stamp(microseconds: int) -> str:
    seconds, rest = divmod(microseconds, 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y%m%dT%H%M%S}.{rest:06d}Z"


class LedgerFile:
    """The open file of one instance. Not thread-safe; every method may block on the disk."""

    def __init__(
        self, folder: Path, instance: str, limit: int, keep: int, clock: Callable[[], float]
    ) -> None:
        """Use :meth:`open`. ``limit`` in bytes; ``keep`` counts all ledger files of the folder."""
        self._folder = folder
        self._instance = re.sub(r"[^A-Za-z0-9._-]", "_", instance)[:64] or "gateway"
        self._limit = limit
        self._keep = keep
        self._clock = clock
        self._fd = -1
        self._size = 0
        self._torn = False
        self._written = 0
        self._last_us = 0
        self.path = folder

    @classmethod
    def open(
        cls, folder: str, instance: str, limit: int, keep: int, clock: Callable[[], float]
    ) -> LedgerFile:
        """Go on in the newest file of this instance if it has room and is free, else begin one.

        :raises ConfigError: the folder cannot be made or written.
        """
        if not folder:
            raise ConfigError("ledger.dir", folder, "names no folder")
        file = cls(Path(folder).expanduser(), instance, limit, keep, clock)
        try:
            file._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not file._resume():
                file._begin()
        except OSError as error:
            raise ConfigError(
                "ledger.dir", folder, f"cannot be written: {error.strerror}"
            ) from error
        return file

    def room(self) -> int:
        """Bytes that the current file still takes; begins another if it was removed under us.

        :raises OSError: there is no file to write.
        """
        self._reopen()
        return max(0, self._limit - self._size)

    def write(self, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
        """Append whole lines, rotating between them; how many are written now, and what failed."""
        kept = 0
        try:
            self._reopen()
            while kept < len(lines):
                batch = self._fitting(lines, kept)
                if not batch:
                    self._begin()
                    continue
                error = self._append(b"".join(batch))
                if error is not None:
                    return kept + self._whole(batch), error
                kept += len(batch)
        except OSError as error:
            return kept, error
        return kept, None

    def close(self) -> None:
        """Close the file; ``write`` would begin a new one."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reopen(self) -> None:
        if self._fd < 0 or os.fstat(self._fd).st_nlink == 0:  # removed under us
            self._begin()

    def _fitting(self, lines: Sequence[bytes], start: int) -> Sequence[bytes]:
        """The lines from ``start`` that still fit; an empty file takes one line of any size."""
        size, end = self._size, start
        while end < len(lines) and (size == 0 or size + len(lines[end]) <= self._limit):
            size += len(lines[end])
            end += 1
        return lines[start:end]

    def _append(self, data: bytes) -> OSError | None:
        """Write what can be written; ``_written`` of ``data`` is in the file then."""
        self._written = 0
        if self._torn:
            try:
                self._size += os.write(self._fd, b"\n")
            except OSError as error:
                return error
            self._torn = False
        rest = memoryview(data)
        while rest:
            try:
                done = os.write(self._fd, rest)
            except OSError as error:
                self._torn = self._written > 0 and data[self._written - 1] != ord("\n")
                return error
            self._size += done
            self._written += done
            rest = rest[done:]  # a full disk may cut the next write
        return None

    def _whole(self, lines: Sequence[bytes]) -> int:
        """How many of ``lines`` the last, incomplete write has put into the file."""
        rest, whole = self._written, 0
        for line in lines:
            rest -= len(line)
            if rest < -1:  # a line that lacks its newline only is whole: the next write begins so
                break
            whole += 1
        return whole

    def _begin(self) -> None:
        """Open a new file whose name sorts after all that this object has opened."""
        self.close()
        moment = max(int(self._clock() * 1e6), self._last_us + 1)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            path = self._folder / f"{_stamp(moment)}-{self._instance}.jsonl"
            try:
                self._fd = os.open(path, flags, 0o600)
                break
            except FileExistsError:
                moment += 1
        _lock(self._fd)
        self.path, self._last_us, self._size, self._torn = path, moment, 0, False
        self._prune()

    def _resume(self) -> bool:
        own = [path for path in self._files() if self._is_own(path)]
        if not own or own[-1].suffix != ".jsonl" or own[-1].stat().st_size >= self._limit:
            return False
        fd = os.open(own[-1], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if not _lock(fd):
            os.close(fd)
            return False
        self._fd, self.path = fd, own[-1]
        self._size, self._torn = os.fstat(fd).st_size, _ends_torn(own[-1])
        return True

    def _is_own(self, path: Path) -> bool:
        match = NAME.match(path.name)
        return match is not None and match["instance"] == self._instance

    def _files(self) -> list[Path]:
        """All ledger files of the folder, oldest first."""
        return sorted(path for path in self._folder.iterdir() if NAME.match(path.name))

    def _prune(self) -> None:
        """Remove the oldest files beyond ``keep``, except those that a process still writes."""
        files = self._files()
        excess = len(files) - self._keep
        for path in files:
            if excess <= 0:
                return
            if path != self.path and self._remove_unused(path):
                excess -= 1

    @staticmethod
    def _remove_unused(path: Path) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another gateway was faster
            return True
        try:
            if not _lock(fd):
                return False
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(fd)
