"""Small traces for the tests of the simulator."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

TRACES = Path(__file__).resolve().parents[1] / "bench" / "traces"


def row(at_ms: float, tokens: int, output: int, ids: list[int], **fields: Any) -> dict[str, Any]:
    """A line of a trace."""
    told = {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": ids}
    return told | fields


def encoded(rows: list[dict[str, Any]]) -> list[bytes]:
    """Lines as they stand in a file."""
    return [json.dumps(told).encode() + b"\n" for told in rows]


def chats(sessions: int = 6, turns: int = 4, block: int = 16) -> list[dict[str, Any]]:
    """Sessions with one system prompt of two blocks, each of whose turns adds three blocks."""
    rows = []
    for session in range(sessions):
        for turn in range(turns):
            blocks = 2 + 3 * (turn + 1)
            ids = [*range(2), *(1000 * (session + 1) + n for n in range(3 * (turn + 1)))]
            at = 150 * session + 900 * turn
            told = row(at, blocks * block + 5, 40, [*ids, -session - turn - 1])
            rows.append(told | {"session_id": session, "turn": turn})
    return sorted(rows, key=lambda told: told["timestamp"])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A trace file, packed if its name says so."""
    data = b"".join(encoded(rows))
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def cut(name: str, lines: int, folder: Path) -> Path:
    """The first requests of a shared trace, as a file of its own."""
    with gzip.open(TRACES / name, "rb") as whole:
        data = b"".join(line for line, _ in zip(whole, range(lines), strict=False))
    path = folder / name.removesuffix(".gz")
    path.write_bytes(data)
    return path
