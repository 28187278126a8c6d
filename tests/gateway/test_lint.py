"""``headwater lint``: planted faults are found and named, clean traffic is left alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from lintcases import CLEAN, PLANTED, chat, prose
from typer.testing import CliRunner

from gateway.cli.lint import app
from gateway.lint import LintError, LintResult, Settings, check, read_prompts
from shared.errors import ConfigError

SEEDS = (1, 2)


def lint(requests: Iterable[dict[str, Any]], **settings: Any) -> LintResult:
    lines = [json.dumps(request).encode() for request in requests]
    return check(read_prompts(lines), Settings(**settings))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name: str, seed: int) -> None:
    cause, make = PLANTED[name]
    result = lint(make(Random(seed)))
    assert {finding.cause for finding in result.findings} == {cause}, result.findings
    share = sum(finding.requests for finding in result.findings) / result.prompts
    # All but the first and those that equal an earlier one: of two roles each has its own cache.
    assert share > (0.4 if cause != "role" else 0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CLEAN)
def test_clean_traffic_has_no_findings(name: str, seed: int) -> None:
    result = lint(CLEAN[name](Random(seed)))
    assert result.findings == ()
    assert result.lost_tokens == 0


def test_what_a_fault_costs() -> None:
    rng = Random(3)
    rules = prose(rng, 300)
    requests = [
        {**chat(f"Request number {n}. {rules}", prose(rng, 10)), "timestamp": 1e9 + 10 * n}
        for n in range(11)
    ]
    result = lint(requests, prefill_tokens_per_s=1000.0)
    (found,) = result.findings
    expected = 10 * len(rules) / 4
    assert expected * 0.98 < found.lost_tokens < expected * 1.02
    assert result.per_day_from == "times"
    assert result.requests_per_day == pytest.approx(11 * 86_400 / 100)
    assert found.tokens_per_day == pytest.approx(found.lost_tokens * 864, rel=0.01)
    assert found.seconds_per_day == pytest.approx(found.tokens_per_day / 1000, rel=0.01)
    assert found.before.endswith("Request number ")
    assert result.reused_tokens + result.lost_tokens <= result.tokens


def test_an_equal_earlier_prompt_is_no_loss() -> None:
    rng = Random(4)
    rules = prose(rng, 300)
    requests = [chat(f"For user_{n % 3:05}. {rules}", prose(rng, 10)) for n in range(12)]
    (found,) = lint(requests).findings
    assert found.requests == 2  # the first of two users: all others find their own


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "line 2 is no JSON"),
        (b"[1]", "neither 'messages' nor 'prompt'"),
        (b'{"body": 3}', "neither 'messages' nor 'prompt'"),
        (b'{"messages": "x"}', "no known form"),
        (b'{"messages": [{"role": 1}]}', "no known form"),
        (b'{"messages": [], "tools": 3}', "no known form"),
        (b'{"prompt": [1, 2]}', "no known form"),
        (b"\xff", "line 2 is no JSON"),
        (b"[" * 100_000, "line 2 is no JSON"),
    ],
)
def test_lines_that_are_no_requests(line: bytes, why: str) -> None:
    with pytest.raises(LintError, match="line 2") as failure:
        list(read_prompts([b'{"prompt": "x"}', line]))
    assert why in str(failure.value)


def test_requests_may_lie_in_batch_lines_and_logs() -> None:
    plain = chat("s", "u")
    lines = [plain, {"custom_id": "1", "body": plain}, {"request": {"body": plain}}]
    prompts = list(read_prompts(json.dumps(line).encode() for line in lines))
    assert len({prompt.parts for prompt in prompts}) == 1


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl.gz"
    requests = PLANTED["user id"][1](Random(1))
    file.write_bytes(gzip.compress(b"\n".join(json.dumps(r).encode() for r in requests)))
    shown = CliRunner().invoke(app, [str(file), "--requests-per-day", "1000"])
    assert shown.exit_code == 0
    assert "1. id in system" in shown.stdout
    assert "1,000 requests a day (as given)" in shown.stdout
    told = json.loads(CliRunner().invoke(app, [str(file), "--format", "json"]).stdout)
    assert [finding["cause"] for finding in told["findings"]] == ["id"]
    assert told["prompts"] == 20


@pytest.mark.parametrize("name", ["requests.jsonl.gz", "requests.packed"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_packed_file_that_breaks_off_is_looked_at_up_to_there(
    tmp_path: Path, form: str, name: str
) -> None:
    # What does not repeat is hardly packed: the cut falls in the midst of the lines.
    noise = Random(1).randbytes(40_000).hex()
    requests = [{"prompt": noise[n * 400 : n * 400 + 400]} for n in range(200)]
    whole = gzip.compress(b"\n".join(json.dumps(r).encode() for r in requests))
    file = tmp_path / name
    file.write_bytes(whole[: len(whole) // 2])
    shown = CliRunner().invoke(app, [str(file), "--format", form])
    assert shown.exit_code == 0, shown.stderr
    assert f"{file}: the packed file breaks off here" in shown.stderr
    assert "line " in shown.stderr
    if form == "json":
        assert 80 < json.loads(shown.stdout)["prompts"] < 120


def test_a_packed_file_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "x"}')[:12])
    shown = CliRunner().invoke(app, [str(file)])
    assert isinstance(shown.exception, ConfigError)
    assert "breaks off" in str(shown.exception)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["{file}", "--format", "html"], "--format"),
        (["{file}", "--min-tokens", "0"], "--min-tokens"),
        (["{file}", "--prefill-rate", "0"], "--prefill-rate"),
        (["{file}", "--requests-per-day", "nan"], "--requests-per-day"),
        (["{file}", "--model", "/nowhere/at/all"], "--model"),
        (["/nowhere/at/all.jsonl"], "FILE.jsonl"),
        (["{folder}"], "FILE.jsonl"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], key: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "x"}\n')
    filled = [one.format(file=file, folder=tmp_path) for one in arguments]
    result = CliRunner().invoke(app, filled)
    assert isinstance(result.exception, ConfigError)
    assert key in str(result.exception)
