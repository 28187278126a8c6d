"""Files that are not what a command reads, URLs that are none: one line, exit code 2, no trace."""

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


URLS = (
    "",
    "nope",
    "http://",
    "ftp://x",
    "http://[::1",
    "http://a b",
    "http://a:b",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:0",
    "http://127.0.0.1:-1",
    "\x7f",
)
ASKING = {
    "explain": ("explain", "{file}"),
    "explain a served one": ("explain", "--request", "x"),
    "index who": ("index", "who", "{file}"),
    "index stats": ("index", "stats"),
    "index flush": ("index", "flush", "--all"),
    "bench": ("bench",),
    "bench a model": ("bench", "--model", "m"),
    "doctor": ("doctor",),
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", ASKING)
def test_what_is_no_url_is_one_line_and_exit_code_2(
    command: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    arguments = [each.format(file=file) for each in ASKING[command]]
    assert run(installed(), [*arguments, "--url", url]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("headwater: --url: ")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("url", URLS[1:])
def test_workers_without_a_url_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("gateway", "--check"), ("doctor", "--wait", "0.1")):
        assert run(installed(), [*command, "--workers", url]) == 2
        told = capsys.readouterr()
        assert told.err.startswith("headwater: workers.urls: ")
        assert told.err.count("\n") == 1
