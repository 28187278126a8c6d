"""A watched file with a list of workers, TOML or JSON.

    workers = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]

    [[workers]]
    url = "http://10.0.0.3:8000"
    drain = true        # no new requests

A file that is gone, unreadable or wrong leaves the list as it was, and is told about.
"""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from gateway.config import FileConfig
from gateway.discovery.base import Fault, Listing, Source, Tell, address_of, worker_url
from shared.errors import ConfigError

KEY = "discovery.file.path"
FILE_LIMIT = 4 << 20
"""Bytes."""

Signature = tuple[int, int, int]
"""Changes when the file does; through a link also when the link does (a mounted ConfigMap)."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    drain: bool = False


class _Listed(msgspec.Struct, forbid_unknown_fields=True):
    workers: list[str | _Entry]


def check_path(config: FileConfig) -> Path:
    """The file's path; raises ``ConfigError`` for a form that is not known by its name."""
    path = Path(config.path).expanduser()
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(KEY, config.path, "must end in .toml or .json")
    return path


def parse(data: bytes, suffix: str) -> Listing:
    """The list in a file's bytes.

    :raises ConfigError: one line: the key in the file, its value, the reason.
    """
    decoded = _decode(data, suffix)
    try:
        listed = msgspec.convert(decoded, _Listed)
    except msgspec.ValidationError as error:
        raise ConfigError("workers", _shown(decoded), str(error)) from None
    workers: dict[str, str] = {}
    addresses: set[str] = set()
    for entry in listed.workers:
        text, drain = (entry, False) if isinstance(entry, str) else (entry.url, entry.drain)
        url = worker_url("workers", text.strip())
        if address_of(url) in addresses:
            raise ConfigError("workers", text, "is there twice")
        addresses.add(address_of(url))
        workers[url] = "asked for in the workers' file" if drain else ""
    return Listing(workers)


def _decode(data: bytes, suffix: str) -> Any:
    try:
        if suffix == ".json":
            return msgspec.json.decode(data)
        return tomllib.loads(data.decode("utf-8"))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(KEY, suffix[1:], f"cannot be read: {error}") from None


def _shown(value: Any) -> str:
    return str(value)[:80]


def signature(path: Path) -> Signature:
    """Of the file now; raises ``OSError``."""
    found = path.stat()
    return (found.st_mtime_ns, found.st_size, found.st_ino)


class FileList:
    """Reads the file when it has changed."""

    source = Source.FILE

    def __init__(self, config: FileConfig) -> None:
        """:raises ConfigError: see :func:`check_path`."""
        self._config = config
        self._path = check_path(config)
        self._read: Signature | None = None

    async def run(self, tell: Tell, fault: Fault) -> None:
        """Look for ever."""
        while True:
            await self.look(tell, fault)
            await asyncio.sleep(self._config.interval_s)

    async def look(self, tell: Tell, fault: Fault) -> None:
        """Read the file if it is another one than at the look before."""
        try:
            found = await asyncio.to_thread(self._changed)
            if found is None:
                return
            tell(parse(found, self._path.suffix))
        except OSError as error:
            self._read = None
            fault(f"{self._path}: {error.strerror or error}")
        except ConfigError as error:
            fault(f"{self._path}: {error}")
        else:
            fault("")

    def _changed(self) -> bytes | None:
        """Its bytes, or None if it is as it was. Blocks."""
        now = signature(self._path)
        if now == self._read:
            return None
        with self._path.open("rb") as stream:
            data = stream.read(FILE_LIMIT + 1)
        if len(data) > FILE_LIMIT:
            raise ConfigError(KEY, str(self._path), f"is larger than {FILE_LIMIT} bytes")
        # What was written while it was read has another signature, and is read at the next look.
        self._read = now
        return data
