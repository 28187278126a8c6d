"""Files that are not what a command reads: one line and exit code 2, never a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.cli import installed, run

GARBAGE = {
    "empty": b"",
    "blank lines": b"\n\n",
    "bytes": bytes(range(256)),
    "a cut-off object": b'{"messages": [{"role": "user"',
    "too deep": b"[" * 100_000,
    "too deep below": b'{"messages":' + b"[" * 100_000,
    "half a surrogate pair": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "another JSON": b"[1]",
}
COMMANDS = {
    "explain": ("explain",),
    "index who": ("index", "who"),
    "lint": ("lint",),
    "replay": ("replay",),
    "simulate": ("simulate", "--workers", "2", "--kv-blocks", "9", "--block-size", "16"),
    "bench": ("bench", "--block-size", "16", "--workload"),
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("command", COMMANDS)
def test_garbage_is_one_line_and_exit_code_2(
    command: str, garbage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "garbage.jsonl"
    file.write_bytes(GARBAGE[garbage])
    assert run(installed(), [*COMMANDS[command], str(file)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("headwater: ")
    assert told.err.count("\n") == 1
