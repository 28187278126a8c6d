"""Records and ledgers for the tests of the ledger, the report and its command."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from gateway.ledgerline import encode_record
from gateway.records import RequestRecord, TokenFlow
from shared.cli import run

START = 1_785_232_800.0
"""2026-07-28 10:00:00 UTC."""

COMMANDS = [
    EntryPoint(name, f"gateway.cli.{name}:app", "headwater.commands")
    for name in ("report", "explain", "index")
]


def record(**fields: Any) -> RequestRecord:
    """A final, answered chat request that arrived at ``START``; ``fields`` override."""
    usual: dict[str, Any] = {
        "at": START,
        "request_id": "r1",
        "attempt": 1,
        "final": True,
        "route": "chat",
        "model": "m",
        "worker": "w1",
        "policy": "cost",
        "trust": "exact",
        "reported": True,
    }
    return RequestRecord(**(usual | fields))


def hit(prompt: int, cached: int, tail: int = 0) -> TokenFlow:
    """``cached`` tokens available, captured and delivered; the others cold."""
    return TokenFlow(
        prompt=prompt,
        tail=tail,
        cold=prompt - tail - cached,
        available=cached,
        captured=cached,
        delivered=cached,
    )


def write_ledger(path: Path, records: Iterable[RequestRecord], *, rest: bytes = b"") -> Path:
    """A ledger file (compressed if so named), then ``rest`` as it is."""
    data = b"".join(map(encode_record, records)) + rest
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def headwater(*arguments: object) -> int:
    """Run ``headwater report``, ``explain`` or ``index`` here; the exit code."""
    return run(COMMANDS, [str(argument) for argument in arguments])
