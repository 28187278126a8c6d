"""``headwater bench``: its workloads, its figures, and a run against stubs."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import DONE, STOP, answer, delta, stream, usage_event
from typer.testing import CliRunner

from gateway.cli.bench import BenchFailed, app, turns_of
from gateway.loadtest.driver import Driver, Target
from gateway.loadtest.result import BenchResult, Client, Done, run_of
from gateway.loadtest.stats import mean_of, quantile_of, times_of
from gateway.loadtest.text import to_text
from gateway.loadtest.tracetext import sessions_of
from gateway.loadtest.workloads import WORKLOADS, Session, Shape, Turn, opening
from gateway.sim.trace import Row, chain
from shared.errors import ConfigError

SHAPE = Shape(sessions=6, groups=2, turns=3, shared_words=50, max_tokens=4)


def texts(sessions: list[Session]) -> list[str]:
    """The first prompt of each session."""
    return [
        first.prompt or "".join(message["content"] for message in first.messages)
        for first in (session.turns[0] for session in sessions)
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_repeat_and_share_what_they_should(name: str) -> None:
    made = [WORKLOADS[name](SHAPE, Random(7), mark) for mark in ("a", "a", "b")]
    assert made[0] == made[1]
    one, other = texts(made[0]), texts(made[2])
    assert not {text[:40] for text in one} & {text[:40] for text in other}
    beginnings = {text[:200] for text in one}
    if name == "unique":
        assert len(beginnings) == len(one) == SHAPE.sessions * SHAPE.turns
    else:
        assert len(beginnings) == SHAPE.groups
    assert len({tuple(session.turns) for session in map(_hashable, made[0])}) == len(made[0])


def test_what_is_unique_shares_not_even_a_word_with_itself_or_with_another_run() -> None:
    """A token or two in common behind a chat template may fill a block."""
    marks = [opening("nonce", number) for number in range(8)]
    words = [mark.split()[0] for mark in marks]
    for mark in marks:
        words += [one.split()[0] for one in texts(WORKLOADS["unique"](SHAPE, Random(7), mark))]
    assert len(set(words)) == len(words) == 8 + 8 * SHAPE.sessions * SHAPE.turns


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_no_policy_is_always_measured_first(rounds: int) -> None:
    turns = turns_of(("a", "b", "c"), rounds)
    assert sorted(turns) == sorted("abc" * rounds)
    means = {name: sum(at for at, one in enumerate(turns) if one == name) for name in "abc"}
    assert len(set(means.values())) == (1 if rounds > 1 else 3)


def _hashable(session: Session) -> Session:
    turns = [Turn((), t.max_tokens, t.prompt + json.dumps(t.messages)) for t in session.turns]
    return Session(tuple(turns))


def test_a_trace_becomes_text_that_is_equal_where_its_blocks_are() -> None:
    rows = [
        Row(0.0, 40, 5, [1, 2, 3], "s"),
        Row(1000.0, 56, 5, [1, 2, 4, 5], "t"),
        Row(9000.0, 72, 5, [1, 2, 3, 9, 10], "s"),
    ]
    sessions = sessions_of(chain(rows, 16), 3, "m", 2.0)
    assert [session.start_s for session in sessions] == [0.0, 0.5]
    assert [len(session.turns) for session in sessions] == [2, 1]
    first, second = (session.turns[0].prompt for session in sessions)
    assert first.split()[:13] == second.split()[:13]  # the mark and two blocks of 6 words
    assert first.split()[13:] != second.split()[13:]
    assert sessions[0].turns[1].prompt.startswith(" ".join(first.split()[:13]))
    assert sessions[0].turns[1].think_s > 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_intervals_hold_their_figures(values: list[float], share: float) -> None:
    for estimate in (mean_of(values), quantile_of(sorted(values), share)):
        assert estimate.low <= estimate.value + 1e-9
        assert estimate.high >= estimate.value - 1e-9
    assert min(values) <= quantile_of(sorted(values), share).value <= max(values)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng, hits = Random(5), 0
    for _ in range(400):
        sample = sorted(rng.expovariate(1.0) for _ in range(100))
        median = quantile_of(sample, 0.5)
        hits += median.low <= 0.693147 <= median.high
    assert 0.9 < hits / 400 < 0.995


def done(**fields: Any) -> Done:
    return Done(**{"at": 0.0, "ttft_s": 0.1, "total_s": 0.2} | fields)


def test_a_run_is_summed_up() -> None:
    requests = [
        done(prompt_tokens=100, cached_tokens=80, reported=True, worker="a", output_tokens=10),
        done(prompt_tokens=100, cached_tokens=0, reported=True, worker="a", output_tokens=10),
        done(prompt_tokens=50, worker="b", output_tokens=20),
        done(ttft_s=None, error="status 503: b''"),
    ]
    run = run_of("cost", requests, 2.0, Client.of(0.1, 0.001))
    assert (run.requests, run.errors, run.first_error) == (4, 1, "status 503: b''")
    assert run.hit_rate == 0.4  # who does not report is not taken for a miss
    assert (run.requests_per_s, run.output_tokens_per_s) == (1.5, 20.0)
    assert run.busiest == pytest.approx(2 * 2 / 3)
    assert run.ttft is not None
    assert run.ttft.count == 3
    assert times_of([]) is None


def test_what_is_told_of_a_run() -> None:
    slow = run_of("", [done()], 1.0, Client.of(0.95, 0.001))
    failed = run_of("", [done(error="x")], 1.0, Client.of(0.1, 0.001))
    kept = {"url": "u", "model": "m", "seed": 1, "concurrency": 8, "rate": None}
    result = BenchResult(workload="rag", runs=[slow, failed], **kept)
    shown = to_text(result, before=result, colour=False)
    assert "the load generator was the bottleneck" in shown
    assert "1 of 1 failed, first: x" in shown
    assert "no worker reports cached_tokens" in shown
    assert "1.00" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert msgspec.json.decode(msgspec.json.encode(result), type=BenchResult) == result


GOOD = stream(delta("a"), delta("b"), STOP, usage_event(120, 2, 96), DONE)


@pytest.mark.parametrize(("concurrency", "rate"), [(3, None), (None, 200.0)])
async def test_sessions_are_conversations(stub, serve, concurrency, rate) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(GOOD)
    sessions = WORKLOADS["multiturn"](SHAPE, Random(1), "x")
    told: list[int] = []
    driver = Driver(Target(url=served.url, model="m"), lambda: told.append(1))
    requests, seconds, client = await driver.run(
        sessions, concurrency=concurrency, rate=rate, seed=1
    )
    assert len(requests) == len(told) == 18
    assert {one.error for one in requests} == {""}
    assert {(one.prompt_tokens, one.cached_tokens, one.worker) for one in requests} == {
        (120, 96, worker.id)
    }
    assert all(one.ttft_s is not None and one.ttft_s <= one.total_s for one in requests)
    assert seconds > 0
    assert client.busy >= 0
    lengths = [len(seen.json["messages"]) for seen in worker.seen]
    assert sorted(lengths) == sorted([2, 4, 6] * 6)
    last = next(seen.json for seen in worker.seen if len(seen.json["messages"]) == 6)
    assert last["messages"][2] == {"role": "assistant", "content": "ab"}


async def test_failures_are_counted_and_end_their_session(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(answer({"error": {"message": "no"}}, 400))
    sessions = WORKLOADS["multiturn"](SHAPE, Random(1), "x")
    driver = Driver(Target(url=served.url, model="m"))
    requests, _, _ = await driver.run(sessions, concurrency=2, rate=None, seed=1)
    assert len(requests) == len(sessions)
    assert all(one.error.startswith("status 400") for one in requests)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--format", "html"], "--format"),
        (["--sessions", "0"], "--sessions"),
        (["--rate", "-1"], "--rate"),
        (["--speed", "nan"], "--speed"),
        (["--compare", "cost,nonsense"], "--compare"),
        (["--workload", "nonsense"], "--workload"),
        (["--url", "nonsense"], "--url"),
        (["--url", "http://[::1"], "--url"),
        (["--against", "/nowhere"], "--against"),
        (["--against", __file__], "--against"),
        (["--workload", __file__], "--block-size"),
    ],
)
def test_wrong_usage(arguments: list[str], key: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError), result.exception
    assert key in str(result.exception)


def test_nobody_to_ask() -> None:
    result = CliRunner().invoke(app, ["--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, BenchFailed)
    assert "\n" not in str(result.exception)
