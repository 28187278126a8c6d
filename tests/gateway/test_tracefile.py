"""The trace file: chains survive delta coding, rotation, restarts and torn lines; never a text."""

from __future__ import annotations

import gzip
import os
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgerkit import START, hit, record

from gateway.config import LedgerConfig
from gateway.decision import Overlap, Route
from gateway.ledger import ledger_salt
from gateway.records import Outcome
from gateway.routing.base import Query
from gateway.sim.files import load_trace
from gateway.sim.trace import TraceError
from gateway.tracefile import (
    Traced,
    TraceDecoder,
    TraceEncoder,
    TraceFileError,
    read_traced,
    salted,
    trace_files,
)
from gateway.tracesink import TraceSink
from shared.types import BlockKey, RequestId

SECRET = b"k" * 16


def query(keys: list[int], number: int = 0, **fields: Any) -> Query:
    values: dict[str, Any] = {
        "request_id": RequestId(f"r{number}"),
        "model": "m",
        "prompt_tokens": len(keys) * 16 + 3,
        "max_tokens": 0,
        "arrived": 0.0,
        "keys": [BlockKey(key) for key in keys],
    }
    return Query(**(values | fields))


def kept(keys: list[int], salt: bytes = SECRET) -> list[int]:
    """Keys as they stand in a file."""
    return [int.from_bytes(salted(key, salt), "little") for key in keys]


def routed(asked: Query) -> Route:
    """A decision about it, of which only the query matters here."""
    return Route(asked, "cost", (), Overlap(), 0.0, 0.0)


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Chains of keys that branch: each goes on from some depth of an earlier one."""
    chains: list[list[int]] = [[]]
    fresh = iter(draw(st.permutations(range(2**63, 2**63 + 400))))
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(chains))
        keep = draw(st.integers(0, len(base)))
        chains.append([*base[:keep], *(next(fresh) for _ in range(draw(st.integers(0, 9))))])
    return chains[1:]


@given(chains=prompts(), window=st.integers(0, 60))
def test_chains_survive_delta_coding(chains: list[list[int]], window: int) -> None:
    encoder, decoder = TraceEncoder(1, SECRET, window), TraceDecoder()
    for number, keys in enumerate(chains):
        line = encoder.encode(query(keys, number), record(request_id=f"r{number}"))
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        traced = decoder.decode(line)
        assert list(traced.keys) == kept(keys)
        assert traced.id == f"r{number}"


def conversation(turns: int, rng: Random) -> Iterator[list[int]]:
    keys: list[int] = []
    for _ in range(turns):
        keys = keys + [rng.getrandbits(64) for _ in range(5)]
        yield keys


def test_a_turn_costs_only_what_is_new() -> None:
    encoder, rng = TraceEncoder(1, SECRET), Random(1)
    sizes = [
        len(encoder.encode(query(keys), record(request_id="req-0123456789abcdef")))
        for keys in conversation(100, rng)
    ]
    assert max(sizes) < 320
    assert sizes[-1] - sizes[1] < 16, "the length of the prompt does not matter"


def test_facts_come_back_and_names_do_not_leave() -> None:
    told = record(
        request_id="r1",
        model="a\ud800\n{}" + "x" * 500,
        worker="w7",
        outcome=Outcome.CLIENT_GONE,
        output_tokens=12,
        total_s=3.25,
        flow=hit(64, 32),
    )
    asked = query([1, 2], session="alice@example.com", tenant="t", prompt_tokens=0)
    line = TraceEncoder(5, SECRET).encode(asked, told)
    assert b"alice" not in line
    traced = TraceDecoder().decode(line)
    assert traced == Traced(
        at=START,
        id="r1",
        model=("a?\n{}" + "x" * 500)[:120],
        prompt_tokens=64,
        output_tokens=12,
        took_s=3.25,
        worker="w7",
        outcome=Outcome.CLIENT_GONE,
        session=traced.session,
        keys=array("Q", kept([1, 2])),
        ttft_s=told.ttft_s,
        itl_s=told.itl_s,
        cached_tokens=32,
        max_tokens=asked.max_tokens,
        policy=told.policy,
    )

    def name(**fields: Any) -> str:
        secret = fields.pop("secret", SECRET)
        encoded = TraceEncoder(5, secret).encode(query([1], **fields), told)
        return TraceDecoder().decode(encoded).session

    same = name(session="alice@example.com", tenant="t")
    assert same == traced.session
    assert len(same) == 16
    others = {
        name(session="alice@example.com"),
        name(session="alice@example.co", tenant="mt"),
        name(session="alice@example.com", tenant="t", secret=b"z"),
        name(session="\ud800", tenant="t"),
    }
    assert len(others) == 4
    assert same not in others
    assert name() == ""


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"n":1,"at":1,"id":"x","model":"m"}',
        b'{"n":9,"at":1,"id":"x","model":"m","tokens":1,"like":1,"same":1}',
        b'{"n":9,"at":1,"id":"x","model":"m","tokens":1,"like":9,"same":1}',
        b'{"n":9,"at":1,"id":"x","model":"m","tokens":1,"keys":"?"}',
        b'{"n":9,"at":1,"id":"x","model":"m","tokens":1,"keys":"AAAA"}',
        b'{"n":9,"at":1,"id":"x","model":"m","tokens":1,"outcome":"odd"}',
    ],
)
def test_a_line_that_is_none_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own errors are some of them
        TraceDecoder().decode(line)


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., TraceSink]]:
    """Opens sinks in ``tmp_path`` and closes them."""
    sinks: list[TraceSink] = []

    def make(kib: float = 64_000.0, keep: int = 100, **more: Any) -> TraceSink:
        config = LedgerConfig(dir=str(tmp_path), rotate_mib=kib / 1024, keep_files=keep)
        sinks.append(TraceSink(config, "8000", secret=b"s", **({"flush_s": 3600.0} | more)))
        return sinks[-1]

    yield make
    for sink in sinks:
        sink.close()


def read(folder: Path) -> tuple[dict[str, list[int]], list[str]]:
    """Keys by request, and what could not be read."""
    bad: list[str] = []
    traced = read_traced(trace_files(folder), lambda file, line, why: bad.append(why))
    return {one.id: list(one.keys) for one in traced}, bad


def fill(sink: TraceSink, chains: dict[str, list[int]], flush_each: int = 7) -> None:
    for number, (name, keys) in enumerate(chains.items()):
        sink.record(routed(query(keys)), record(request_id=name, output_tokens=1))
        if number % flush_each == 0:
            sink.flush()
    sink.flush()


def talks(n: int, turns: int, seed: int) -> dict[str, list[int]]:
    rng = Random(seed)
    found = {
        f"{seed}-{at}-{turn}": keys
        for at in range(n)
        for turn, keys in enumerate(conversation(turns, rng))
    }
    names = list(found)
    rng.shuffle(names)
    return {name: found[name] for name in names}


def all_kept(chains: dict[str, list[int]]) -> dict[str, list[int]]:
    """As they stand in the files of :func:`opened`."""
    salt = ledger_salt(Path(), b"s")
    return {name: kept(keys, salt) for name, keys in chains.items()}


def test_every_file_stands_for_itself(opened: Any, tmp_path: Path) -> None:
    chains = talks(20, 10, 1)
    fill(opened(kib=4), chains)
    files = trace_files(tmp_path)
    assert len(files) > 8
    assert max(file.stat().st_size for file in files) <= 4096
    assert {os.stat(file).st_mode & 0o777 for file in files} == {0o600}
    assert read(tmp_path) == (all_kept(chains), [])
    for file in files[::2]:
        file.unlink()
    rest, bad = read(tmp_path)
    assert bad == []
    assert rest.items() <= all_kept(chains).items()


def test_a_restarted_gateway_goes_on_in_its_file(opened: Any, tmp_path: Path) -> None:
    first, second = talks(5, 5, 1), talks(5, 5, 2)
    sink = opened()
    fill(sink, first)
    sink.close()
    sink.close()
    fill(opened(), second)
    assert len(trace_files(tmp_path)) == 1
    assert read(tmp_path) == (all_kept(first | second), [])


def test_a_small_window_and_old_files_go(opened: Any, tmp_path: Path) -> None:
    chains = talks(10, 10, 3)
    fill(opened(kib=4, keep=3, window_keys=40), chains)
    assert len(trace_files(tmp_path)) == 3
    rest, bad = read(tmp_path)
    assert bad == []
    assert rest.items() <= all_kept(chains).items()


def test_a_file_that_is_removed_or_torn_spoils_only_itself(opened: Any, tmp_path: Path) -> None:
    one, two, three = talks(3, 4, 4), talks(3, 4, 5), talks(3, 4, 6)
    sink = opened()
    fill(sink, one)
    sink.path.unlink()
    fill(sink, one | two)
    assert read(tmp_path) == (all_kept(one | two), [])
    sink.close()
    with sink.path.open("ab") as file:
        file.write(b'{"n":1,"at":17')
    fill(opened(), three)
    got, bad = read(tmp_path)
    assert got == all_kept(one | two | three)
    assert len(bad) == 1


def test_what_cannot_be_written_is_counted_and_refers_to_nothing(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lost, after = talks(2, 4, 7), talks(2, 4, 8), talks(2, 4, 9)
    sink = opened()
    fill(sink, before)
    real = os.write

    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gateway.ledgerfile.os.write", full)
        fill(sink, lost)
    assert real is os.write
    assert sink.dropped == len(lost)
    fill(sink, lost | after)
    assert read(tmp_path) == (all_kept(before | lost | after), [])


def test_a_full_queue_loses_requests_and_says_so(opened: Any) -> None:
    sink = opened(queue_requests=3)
    for number in range(5):
        sink.record(routed(query([number])), record())
    assert sink.dropped == 2
    sink.record(routed(query([])), record())
    sink.record(routed(query([], prompt_tokens=0)), record())
    sink.record(routed(query([1])), record(final=False))
    assert sink.dropped == 3, "what has no prompt, and attempts before the last, are passed over"


def test_packed_files_and_missing_ones(opened: Any, tmp_path: Path) -> None:
    chains = talks(2, 3, 10)
    sink = opened()
    fill(sink, chains)
    sink.close()
    packed = sink.path.with_name(sink.path.name + ".gz")
    packed.write_bytes(gzip.compress(sink.path.read_bytes()))
    sink.path.unlink()
    assert read(tmp_path) == (all_kept(chains), [])
    assert trace_files(tmp_path / "trace") == trace_files(tmp_path) == [packed]
    with pytest.raises(TraceFileError):
        list(read_traced([tmp_path / "none.jsonl"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceFileError):
        trace_files(tmp_path / "empty")


@pytest.mark.parametrize("kept", [0, 5, 0.3, 0.9, -5])
def test_a_packed_file_that_breaks_off_gives_its_beginning(
    opened: Any, tmp_path: Path, kept: float
) -> None:
    chains = talks(20, 3, 10)
    sink = opened()
    fill(sink, chains)
    sink.close()
    data = gzip.compress(sink.path.read_bytes())
    sink.path.unlink()
    packed = sink.path.with_name(sink.path.name + ".gz")
    packed.write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else int(kept)])
    got, bad = read(tmp_path)
    whole = all_kept(chains)
    assert got == dict(islice(whole.items(), len(got)))
    assert (len(got) == len(whole)) == (kept < 0)
    assert len(got) or kept in (0, 5)
    assert len(bad) == 1, "where it breaks off is told"


# --- simulated -----------------------------------------------------------------------------------


def test_recorded_traffic_is_a_trace(opened: Any, tmp_path: Path) -> None:
    """Two turns of a session, then one stranger, in the order of their ends."""
    keys = list(range(100, 112))
    sink = opened()
    for number, at, took, session, chain in (
        (0, 10.0, 2.0, "s", keys[:4]),
        (2, 11.0, 0.5, "", keys[:2]),
        (1, 15.0, 1.0, "s", keys),
    ):
        told = record(request_id=f"r{number}", at=START + at, total_s=took, output_tokens=40)
        sink.record(routed(query(chain, number, session=session)), told)
    refused = record(request_id="r9", outcome=Outcome.REJECTED)
    sink.record(routed(query(keys, 9)), refused)
    sink.flush()
    trace = load_trace(tmp_path, 16)
    assert trace.block_size == 16
    assert [one.input_tokens for one in trace.requests] == [67, 35, 195]
    one, stranger, two = trace.requests
    assert stranger.path == one.path[:2]
    assert two.path[:4] == one.path
    assert (one.following, two.first, stranger.first) == (2, False, True)
    assert two.think_s == pytest.approx(15.0 - 10.0 - 2.0)
    assert one.answer == two.path[4:6], "its 40 tokens fill two blocks more"
    wide = load_trace(tmp_path, 32)
    assert [len(each.path) for each in wide.requests] == [2, 1, 6]
    assert len(load_trace(tmp_path, 16, limit=2).requests) == 2
    with pytest.raises(TraceError, match="multiple"):
        load_trace(tmp_path, 24)


def test_one_model_is_simulated_at_a_time(opened: Any, tmp_path: Path) -> None:
    sink = opened()
    for number, model in enumerate(("b", "a", "a")):
        told = record(request_id=f"r{number}", model=model, output_tokens=1)
        sink.record(routed(query([number])), told)
    sink.flush()
    with pytest.raises(TraceError, match="has requests for a, b: choose one with --model"):
        load_trace(tmp_path, 16)
    assert len(load_trace(tmp_path, 16, model="a").requests) == 2
    with pytest.raises(TraceError, match="no answered request for c in it; it has a, b"):
        load_trace(tmp_path, 16, model="c")
