"""``headwater simulate`` as it is typed: the table, JSON, progress, exit codes."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
from simkit import chats, encoded, row, write

from gateway.routing.catalogue import FACTORIES
from gateway.sim.model import WorkerModel
from gateway.sim.result import Ttft
from gateway.sim.simulate import simulate
from gateway.sim.text import to_text
from gateway.sim.trace import read_trace
from shared.cli import run

ROOT = Path(__file__).resolve().parents[2]
COMMAND = EntryPoint("simulate", "gateway.cli.simulate:app", "headwater.commands")
POOL = ("--workers", 2, "--kv-blocks", 60)


def headwater(*arguments: object) -> int:
    return run([COMMAND], ["simulate", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.b16.jsonl.gz", chats())


def test_the_table_has_every_policy_and_the_bounds(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headwater(trace, *POOL, "--load", 0.7) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == "chats.b16.jsonl.gz: 24 requests in 6 sessions, 3,768 prompt tokens"
    assert lines[1].startswith("2 workers of 60 blocks of 16 tokens, load 0.7 (the trace's times x")
    names = [line.split()[0] for line in lines[4 : 4 + len(FACTORIES)]]
    assert names == list(FACTORIES)
    assert any(line.startswith("bound: pool ") for line in lines)
    assert any(line.startswith("bound: infinite ") for line in lines)
    assert max(map(len, lines)) <= 100
    progress = told.err.splitlines()
    assert progress == [f"{name}: 24 requests simulated" for name in FACTORIES]


@pytest.mark.parametrize("colour", [False, True])
def test_no_number_is_cut_however_large(colour: bool) -> None:
    trace = read_trace(encoded(chats()), 16)
    result = simulate("t", trace, WorkerModel(kv_blocks=60), 2, FACTORIES)
    slow = Ttft(mean_s=345.6, p50_s=0.0123, p90_s=12345.6, p99_s=98765.4)
    policies = [msgspec.structs.replace(one, ttft=slow) for one in result.policies]
    text = to_text(msgspec.structs.replace(result, policies=policies), colour=colour)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert ("\x1b[" in text) is colour
    assert "…" not in plain
    assert plain.count("98,765 s") == len(FACTORIES)
    assert plain.count("12.3 ms") == len(FACTORIES)
    assert max(map(len, plain.splitlines())) <= 100


def test_json_has_stable_names(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (trace, *POOL, "--policy", "cost,random", "--policy", "cost", "--format", "json")
    assert headwater(*arguments) == 0
    form = json.loads(capsys.readouterr().out)
    assert set(form) == {
        *("trace", "requests", "sessions", "block_size", "input_tokens", "output_tokens"),
        *("workers", "worker", "load", "time_scale", "seed", "bounds", "policies"),
    }
    assert set(form["bounds"]) == {
        *("infinite_hit_rate", "pooled_hit_rate", "utilisation"),
        *("ttft_alone", "ttft_infinite", "ttft_pooled"),
    }
    assert [result["policy"] for result in form["policies"]] == ["cost", "random"]
    for result in form["policies"]:
        assert set(result) == {
            *("policy", "hit_rate", "ttft", "busiest_work", "busiest_requests", "utilisation"),
            *("requests", "end_s"),
        }
        assert set(result["ttft"]) == {"mean_s", "p50_s", "p90_s", "p99_s"}
        assert sum(result["requests"]) == 24
    assert form["load"] is None
    assert form["time_scale"] == 1.0


def test_a_terminal_gets_a_bar_and_the_result_stays_clean(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert headwater(trace, *POOL, "--policy", "cost", "--format", "json") == 0
    told = capsys.readouterr()
    assert "100%" in told.err
    assert "simulated" not in told.err
    assert json.loads(told.out)["policies"][0]["policy"] == "cost"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--seed", 7),
        ("--limit", 9),
        ("--load", 0.4),
        ("--prefill-rate", 500),
        ("--overhead", 0.5),
        ("--token-time", 0.5),
        ("--decode-knee", 1),
        ("--decode-tax", 5),
        ("--max-running", 1),
        ("--quadratic", 0.1),
        ("--workers", 3),
        ("--kv-blocks", 24),
    ],
)
def test_every_flag_has_an_effect(
    trace: Path, capsys: pytest.CaptureFixture[str], flag: str, value: float
) -> None:
    base = ["--workers", 2, "--kv-blocks", 60, "--load", 0.9, "--format", "json"]
    policies = ["--policy", "random,cost"]
    assert headwater(trace, *base, *policies) == 0
    before = json.loads(capsys.readouterr().out)
    assert headwater(trace, *base, *policies, flag, value) == 0
    after = json.loads(capsys.readouterr().out)
    assert before["policies"] != after["policies"]


def test_the_block_size_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "chats.jsonl", chats())
    assert headwater(path, *POOL) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.endswith("its name tells no block size (.b64.): give --block-size")
    assert headwater(path, *POOL, "--block-size", 16) == 0


def test_timestamps_may_count_from_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for start in (0, 1_785_000_000_000):
        rows = [one | {"timestamp": one["timestamp"] + start} for one in chats()]
        path = write(tmp_path / "t.b16.jsonl", rows)
        assert headwater(path, *POOL, "--policy", "round_robin", "--format", "json") == 0
        told.append(json.loads(capsys.readouterr().out))
    early, late = (form["policies"][0] for form in told)
    assert late["utilisation"] == pytest.approx(early["utilisation"], rel=1e-3)
    assert late["ttft"]["mean_s"] == pytest.approx(early["ttft"]["mean_s"], rel=1e-3)


def test_overload_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(n, 160, 1, [10 * n + at for at in range(10)]) for n in range(30)]
    path = write(tmp_path / "burst.b16.jsonl", rows)
    assert headwater(path, *POOL, "--policy", "cost") == 0
    assert "no policy keeps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--workers", 0], "--workers: 0: must be at least 1"),
        (["--kv-blocks", 0], "--kv-blocks: 0: must be at least 1"),
        (["--kv-blocks", 5], "--kv-blocks: 5: the largest request of the trace needs 17 blocks"),
        (["--policy", "least_load"], "--policy: 'least_load': is none of cost, round_robin"),
        (["--kv-blocks", 10**9], "--kv-blocks: 1000000000: with 2 workers these are more than"),
        (["--load", "0"], "--load: 0.0: must be a number from 0.0001 to 1e+09"),
        (["--load", "nan"], "--load: nan: must be a number from"),
        (["--prefill-rate", "1e-300"], "--prefill-rate: 1e-300: must be a number from"),
        (["--token-time", "inf"], "--token-time: inf: must be a number from"),
        (["--overhead", "-1"], "--overhead: -1.0: must be a number from 0 to 1e+09"),
        (["--block-size", 0], "--block-size: 0: must be at least 1"),
        (["--block-size", 32], "TRACE: "),
        (["--limit", -1], "--limit: -1: must be at least 0"),
        (["--format", "csv"], "--format: 'csv': is none of text, json"),
        (["--workers", "many"], "Invalid value for '--workers'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[object], error: str
) -> None:
    assert headwater(trace, *POOL, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headwater: {error}")


def test_a_policys_name_is_suggested(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headwater(trace, *POOL, "--policy", "least_load") == 2
    assert capsys.readouterr().err.endswith("did you mean least_loaded?\n")


@pytest.mark.parametrize("content", [None, b"", b"hello\n", b"\x1f\x8bnonsense"])
def test_no_trace_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    path = tmp_path / "t.b16.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert headwater(path, *POOL) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headwater: TRACE: {str(path)!r}: ")


def test_it_is_installed_and_its_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    commands = project["project"]["entry-points"]["headwater.commands"]
    assert commands["simulate"] == COMMAND.value
    assert headwater("--help") == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Example: headwater simulate" in shown
    assert "--kv-blocks" in shown
