"""The ledger: lines, files, rotation, and what happens when writing fails."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledgerkit import START, hit, record

from gateway.config import LedgerConfig
from gateway.ledger import SALT_FILE, LedgerSink, default_dir
from gateway.ledgerfile import NAME
from gateway.ledgerline import Dropped, decode_record, encode_record
from gateway.records import Outcome, RequestRecord, TokenFlow
from gateway.report import summarise
from shared.errors import ConfigError

ALL_TERMS = TokenFlow(
    prompt=131_072,
    tail=16,
    cold=10_000,
    evicted=11_056,
    available=110_000,
    captured=100_000,
    diverted_for_load=4000,
    draining=3000,
    policy=2000,
    isolation=1000,
    delivered=95_000,
    stale_index=3000,
    token_mismatch=2000,
    unreported=1000,
    gained=1000,
)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., LedgerSink]]:
    """Opens sinks in ``tmp_path`` and closes them."""
    sinks: list[LedgerSink] = []

    def make(instance: str = "8000", mib: float = 64.0, keep: int = 16, **more: Any) -> LedgerSink:
        config = LedgerConfig(dir=str(tmp_path), rotate_mib=mib, keep_files=keep)
        sinks.append(LedgerSink(config, instance, **({"flush_s": 3600.0} | more)))
        return sinks[-1]

    yield make
    for sink in sinks:
        sink.close()


def ledger_files(folder: Path) -> list[Path]:
    """Oldest first; the salt lies beside them."""
    return sorted(file for file in folder.iterdir() if file.name != SALT_FILE)


def read(folder: Path) -> list[RequestRecord | Dropped]:
    """Everything in all files of a folder, oldest file first."""
    files = ledger_files(folder)
    return [decode_record(line) for file in files for line in file.read_bytes().splitlines()]


def test_a_line_gives_its_record_back() -> None:
    full = record(
        at=START + 0.125,
        attempt=3,
        final=False,
        tenant="t",
        family="ab",
        outcome=Outcome.UPSTREAM_ERROR,
        status=502,
        flow=ALL_TERMS,
        output_tokens=7,
        decided_s=0.25,
        ttft_s=0.5,
        total_s=1.5,
        itl_s=0.125,
        predicted_ttft_s=0.75,
        reported=False,
    )
    assert decode_record(encode_record(full)) == full
    assert decode_record(encode_record(record())) == record()


def test_a_line_is_short_and_says_nothing_twice() -> None:
    line = encode_record(
        record(
            at=START + 0.123456,
            request_id="0123456789abcdef" * 2,
            model="HuggingFaceTB/SmolLM2-135M-Instruct",
            family="0123456789abcdef",
            worker="10.12.113.24:8100",
            flow=hit(4407, 3500, tail=7),
            output_tokens=128,
            decided_s=0.000412345,
            ttft_s=0.08123456,
            total_s=1.23456789,
            itl_s=0.012345678,
            predicted_ttft_s=0.07991234,
        )
    )
    assert len(line) <= 410
    assert b"evicted" not in line
    assert b"outcome" not in line
    assert line.count(b"\n") == 1


def test_names_that_clients_choose_cannot_break_or_swell_a_line() -> None:
    line = encode_record(record(model='x\n{"level":"x"}\ud800' + "y" * 5000))
    assert line.count(b"\n") == 1
    assert len(line) < 700
    read_back = decode_record(line)
    assert isinstance(read_back, RequestRecord)
    assert read_back.model.startswith('x\n{"level":"x"}?y')


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b"null", b'{"at":1,"id":"a","route":"chat","model":"m","flow":{"x":1}}']
)
def test_json_that_is_no_record_is_told_from_a_torn_line(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_record(line)
    with pytest.raises(msgspec.DecodeError) as torn:
        decode_record(encode_record(record())[:-20])
    assert not isinstance(torn.value, msgspec.ValidationError)


def test_the_writer_needs_no_asking(opened: Callable[..., LedgerSink], tmp_path: Path) -> None:
    sink = opened(flush_s=0.001)
    sink.record(record())
    limit = time.monotonic() + 30
    while sink.written == 0 and time.monotonic() < limit:
        time.sleep(0.001)
    assert len(read(tmp_path)) == 1


def test_records_are_written_in_order_to_a_private_file(
    opened: Callable[..., LedgerSink], tmp_path: Path
) -> None:
    sink = opened()
    sink.record(record(request_id="a"))
    sink.record(record(request_id="b"))
    sink.flush()
    assert [r.request_id for r in read(tmp_path) if isinstance(r, RequestRecord)] == ["a", "b"]
    assert (sink.written, sink.dropped) == (2, 0)
    assert stat.S_IMODE(sink.path.stat().st_mode) == 0o600
    assert NAME.match(sink.path.name)


def test_close_writes_what_is_queued_and_later_records_are_counted(
    opened: Callable[..., LedgerSink], tmp_path: Path
) -> None:
    sink = opened()
    for _ in range(1000):
        sink.record(record())
    sink.close()
    sink.close()
    assert len(read(tmp_path)) == 1000
    sink.record(record())
    assert sink.dropped == 1


def test_a_full_queue_drops_and_the_ledger_tells_how_many(
    opened: Callable[..., LedgerSink], tmp_path: Path
) -> None:
    sink = opened(queue_records=0, clock=lambda: START)
    for _ in range(7):
        sink.record(record())
        sink.flush()
    sink.close()
    told = [line for line in read(tmp_path) if isinstance(line, Dropped)]
    assert sum(line.dropped for line in told) == 7
    assert sink.dropped == 7


def test_files_rotate_by_size_between_lines_and_the_oldest_go(
    opened: Callable[..., LedgerSink], tmp_path: Path
) -> None:
    size = len(encode_record(record(request_id="000")))
    sink = opened(mib=10.5 * size / 2**20, keep=3, clock=lambda: START)
    for number in range(95):
        sink.record(record(request_id=f"{number:03}"))
        if number % 7 == 0:
            sink.flush()
    sink.close()
    files = ledger_files(tmp_path)
    assert [file.stat().st_size // size for file in files] == [10, 10, 5]
    kept = [r.request_id for r in read(tmp_path) if isinstance(r, RequestRecord)]
    assert kept == [f"{number:03}" for number in range(70, 95)]
    assert sink.written == 95


def test_pruning_spares_what_another_gateway_writes(
    opened: Callable[..., LedgerSink], tmp_path: Path
) -> None:
    old = opened("other", clock=lambda: START - 1000)
    (tmp_path / "notes.txt").write_text("not ours")
    size = len(encode_record(record()))
    sink = opened("8000", mib=1.5 * size / 2**20, keep=1, clock=lambda: START)
    for _ in range(3):
        sink.record(record())
    sink.flush()
    assert old.path.exists()
    assert {file.name for file in ledger_files(tmp_path)} == {
        old.path.name,
        sink.path.name,
        "notes.txt",
    }


def test_a_restarted_gateway_goes_on_in_its_file_after_a_torn_line(
    opened: Callable[..., LedgerSink], tmp_path: Path
) -> None:
    first = opened(clock=lambda: START)
    first.record(record(request_id="a"))
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"at":1,"id":"cut')
    again = opened(clock=lambda: START + 60)
    again.record(record(request_id="b"))
    again.close()
    assert again.path == first.path
    lines = first.path.read_bytes().split(b"\n")
    assert lines[1] == b'{"at":1,"id":"cut'
    assert [b'"id":"a"' in lines[0], b'"id":"b"' in lines[2], lines[3]] == [True, True, b""]


def test_two_processes_of_one_name_never_share_a_file(opened: Callable[..., LedgerSink]) -> None:
    assert opened("8000").path != opened("8000").path


def test_a_removed_file_is_noticed(opened: Callable[..., LedgerSink], tmp_path: Path) -> None:
    sink = opened()
    sink.path.unlink()
    sink.record(record(request_id="a"))
    sink.flush()
    assert [r.request_id for r in read(tmp_path) if isinstance(r, RequestRecord)] == ["a"]


def test_a_full_disk_loses_counted_records_and_heals(
    opened: Callable[..., LedgerSink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened()
    real, room = os.write, [10]

    def cut(fd: int, data: memoryview) -> int:
        if room:
            return real(fd, data[: room.pop()])
        raise OSError(errno.ENOSPC, "No space left on device")

    sink.record(record(request_id="lost"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", cut)
        sink.flush()
    assert (sink.written, sink.dropped) == (0, 1)
    sink.record(record(request_id="kept"))
    sink.flush()
    lines = sink.path.read_bytes().splitlines()
    assert len(lines[0]) == 10
    kept, told = decode_record(lines[1]), decode_record(lines[2])
    assert isinstance(kept, RequestRecord)
    assert kept.request_id == "kept"
    assert isinstance(told, Dropped)
    assert told.dropped == 1


@pytest.mark.parametrize("folder", ["", "file/below"])
def test_a_folder_that_cannot_be_is_a_configuration_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    where = str(tmp_path / folder) if folder else ""
    with pytest.raises(ConfigError, match=r"^ledger\.dir: "):
        LedgerSink(LedgerConfig(dir=where), "8000")


def test_a_killed_gateway_leaves_whole_lines(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "from ledgerkit import record\n"
        "from gateway.config import LedgerConfig\n"
        "from gateway.ledger import LedgerSink\n"
        "sink = LedgerSink(LedgerConfig(dir=sys.argv[1]), '8000')\n"
        "[sink.record(record(request_id=str(n))) for n in range(500)]\n"
        "sink.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = [path for path in sys.path if path]
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path), *paths], check=False)
    assert ended.returncode == -9
    assert len(read(tmp_path)) == 500


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/headwater/ledger"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/headwater/ledger"),
        ({"HOME": "/h"}, "/h/.local/state/headwater/ledger"),
    ],
)
def test_the_default_folder_follows_xdg(env: dict[str, str], expected: str) -> None:
    assert default_dir(env) == Path(expected)


FULL_DISK = """
import os, resource, signal, sys
sys.path[:0] = sys.argv[2:]
from ledgerkit import record
from gateway.config import LedgerConfig
from gateway.ledger import LedgerSink
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = LedgerSink(LedgerConfig(dir=sys.argv[1]), "8000", flush_s=3600.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (3001, resource.RLIM_INFINITY))
for n in range(500):
    sink.record(record(request_id=str(n)))
sink.flush()
lost = sink.dropped
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sink.record(record(request_id="after"))
sink.close()
print(sink.written, lost, sink.dropped)
"""


def test_a_file_system_that_takes_no_more_loses_counted_records_only(tmp_path: Path) -> None:
    """A real refusal by the kernel, in the middle of a line."""
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), *paths],
        check=True,
        capture_output=True,
        text=True,
    )
    written, lost, dropped = map(int, done.stdout.split()[-3:])
    assert lost == dropped > 400
    assert written + dropped == 501
    report = summarise([tmp_path])
    assert (report.records, report.dropped_records, report.skipped_lines) == (written, dropped, 1)


CRASH = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from ledgerkit import record
from gateway.config import LedgerConfig
from gateway.ledger import LedgerSink
real = os.write
def dies(fd, data):
    real(fd, bytes(data)[: len(data) - 40])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = dies
sink = LedgerSink(LedgerConfig(dir=sys.argv[1]), "8000", secret=b"s", flush_s=3600.0)
for n in range(20):
    sink.record(record(request_id=str(n)))
sink.flush()
"""


def test_a_gateway_that_dies_in_the_middle_of_a_line_loses_that_line(
    opened: Callable[..., LedgerSink], tmp_path: Path
) -> None:
    paths = [path for path in sys.path if path]
    ended = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), *paths], check=False)
    assert ended.returncode == -9
    assert (summarise([tmp_path]).records, summarise([tmp_path]).skipped_lines) == (19, 1)
    again = opened()
    again.record(record(request_id="after"))
    again.close()
    report = summarise([tmp_path])
    assert (len(report.files), report.records, report.skipped_lines) == (1, 20, 1)
