"""Samples of prompts: only if asked for, only what lint looks at, never in the way of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lintset import cases
from stepkit import calls
from typer.testing import CliRunner

from gateway.cli.lint import app
from gateway.config import GatewayConfig, LedgerConfig
from gateway.exchange import Inbound
from gateway.openers import check_config, open_samples
from gateway.samples import MAX_BODY, QUEUE_SAMPLES, SampleSink, sample_line
from shared.errors import ConfigError
from shared.types import RequestId

SECRET = "sk-not-for-files"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def sink(folder: Path) -> Iterator[SampleSink]:
    opened = SampleSink(LedgerConfig(dir=str(folder), samples_per_minute=6_000), "8000", flush_s=60)
    yield opened
    opened.close()


def inbound(body: Any, at: float = 0.0) -> Inbound:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Inbound(
        request_id=RequestId("r"),
        route="/v1/chat/completions",
        target="/v1/chat/completions",
        headers={"authorization": f"Bearer {SECRET}"},
        body=raw,
        arrived=at,
        wall_at=1e9 + at,
    )


def kept(folder: Path) -> list[dict[str, Any]]:
    (file,) = (folder / "samples").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_nothing_is_kept_unless_it_was_asked_for(folder: Path) -> None:
    assert open_samples(GatewayConfig(ledger=LedgerConfig(dir=str(folder)))) is None
    assert not folder.exists()
    with pytest.raises(ConfigError, match=r"samples_per_minute: 1\.0: needs \[ledger\] dir"):
        check_config(GatewayConfig(ledger=LedgerConfig(samples_per_minute=1.0)))


def test_only_what_lint_looks_at_is_kept(sink: SampleSink, folder: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    sink.offer(
        inbound(
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": "rules", "name": "n"},
                    {"role": "user", "content": [{"type": "text", "text": "see"}, picture]},
                    {"role": "assistant", "content": "answer"},
                    {"role": "user", "content": "and then"},
                ],
                "tools": tools,
                "user": "someone",
                "metadata": {"k": SECRET},
                "cache_salt": SECRET,
            }
        )
    )
    sink.offer(inbound({"model": "m", "prompt": "text", "suffix": "s"}))
    sink.offer(
        inbound({"model": "m", "system": "own", "messages": [{"role": "user", "content": "u"}]})
    )
    sink.flush()
    assert [{**line, "timestamp": 0} for line in kept(folder)] == [
        {
            "timestamp": 0,
            "of": 1,
            "model": "m",
            "messages": [
                {"role": "system", "content": "rules"},
                {"role": "user", "content": "see"},
            ],
            "tools": tools,
        },
        {"timestamp": 0, "of": 1, "model": "m", "prompt": "text"},
        {
            "timestamp": 0,
            "of": 1,
            "model": "m",
            "messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}],
        },
    ]


@pytest.mark.parametrize(
    "body", [b"{", b"\xff", b"[]", b"{}", b'{"prompt": [1, 2]}', b"[" * 100_000, b'{"messages": 1}']
)
def test_what_holds_no_text_is_passed_over(body: bytes) -> None:
    assert sample_line(1.0, 1, body) is None


def test_the_rate_holds_and_the_others_are_counted(folder: Path) -> None:
    sink = SampleSink(LedgerConfig(dir=str(folder), samples_per_minute=60), "8000", flush_s=60)
    for number in range(400):
        sink.offer(inbound({"prompt": f"p{number}"}, at=100.0 + number * 0.05))
    sink.close()
    lines = kept(folder)
    assert len(lines) == pytest.approx(10 + 20, abs=1)  # at once, and one a second
    assert 380 <= sum(line["of"] for line in lines) <= 400


def test_a_full_queue_and_a_large_body_cost_a_request_nothing(
    sink: SampleSink, folder: Path
) -> None:
    sink.offer(inbound(b'{"prompt": "' + b"x" * MAX_BODY + b'"}'))

    def more() -> None:
        for number in range(QUEUE_SAMPLES + 5):
            sink.offer(inbound({"prompt": str(number)}, at=float(number)))

    made = calls(more)
    assert made < 50 * (QUEUE_SAMPLES + 5)
    assert sink.dropped == 5
    sink.flush()
    assert len(kept(folder)) == QUEUE_SAMPLES


def test_a_disk_that_takes_nothing_is_counted(
    sink: SampleSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    sink.offer(inbound({"prompt": "p"}))
    monkeypatch.setattr("os.write", full)
    sink.flush()
    monkeypatch.undo()
    assert sink.dropped == 1


def test_lint_reads_a_ledgers_samples(sink: SampleSink, folder: Path) -> None:
    planted = next(case for case in cases(1) if case.name == "date: iso instant")
    for number, body in enumerate(planted.bodies):
        sink.offer(inbound(body, at=10.0 * number))
    sink.flush()
    told = CliRunner().invoke(app, [str(folder), "--format", "json"])
    assert told.exit_code == 0, told.exception
    result = json.loads(told.stdout)
    assert [finding["cause"] for finding in result["findings"]] == ["date"]
    assert result["prompts"] == len(planted.bodies)
    span_s = 10.0 * (len(planted.bodies) - 1)
    assert result["requests_per_day"] == pytest.approx(len(planted.bodies) * 86_400 / span_s)


def test_lint_says_how_a_ledger_without_samples_gets_some(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "samples_per_minute" in str(result.exception)
