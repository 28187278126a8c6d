"""``headwater replay``: decisions taken again, workers fitted to times, traffic served again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import pytest
from ledgerkit import START, hit
from ledgerkit import record as told
from routerkit import Rig
from typer.testing import CliRunner

from gateway.cli.replay import app
from gateway.config import LedgerConfig
from gateway.records import RequestRecord
from gateway.routing.base import Query
from gateway.routing.catalogue import FACTORIES
from gateway.sim.fit import fit_memory, fit_speed, told_memory
from gateway.sim.model import WorkerModel
from gateway.sim.recorded import answered, trace_of
from gateway.sim.recount import replay
from gateway.sim.recounttext import to_text
from gateway.sim.redecide import redecide
from gateway.sim.replay import Replay
from gateway.tracefile import Traced, TraceDecoder, TraceEncoder
from gateway.tracesink import TraceSink
from shared.errors import ConfigError
from shared.types import BlockKey, RequestId

TRUE = WorkerModel(
    kv_blocks=700, prefill_tokens_per_s=5_000.0, overhead_s=0.02, token_s=0.01, decode_tax=0.0
)
EXACT = sorted(
    set(FACTORIES) - {"random", "two_choices", "dynamo_linear", "prefix_hash", "session"}
)
"""Without policies that draw lots, and those that go by keys and names, which are salted here."""


def recorded(policy: str, requests: int = 80) -> Iterator[Traced]:
    """Decisions of a live router, through the lines of a trace file."""
    rig = Rig(4, policy=policy)
    encoder, decoder = TraceEncoder(1, b"salt"), TraceDecoder()
    prompts = [rig.prompt(12) for _ in range(6)]
    open_leases = []
    for number in range(requests):
        rig.now += 0.05
        keys = [*rig.rng.choice(prompts), *rig.prompt(number % 5)]
        route = rig.route(keys)
        lease = rig.router.begin(route, rig.now, attempt=1)
        open_leases.append(lease)
        if number % 3 == 2:
            rig.warm(route.worker, keys)
            open_leases.pop(0).first_token(rig.now)
        line = encoder.encode(
            route.query,
            told(request_id=route.query.request_id, worker=route.worker, policy=policy),
            [scored.candidate for scored in route.order],
        )
        yield decoder.decode(line)


@pytest.mark.parametrize("policy", EXACT)
def test_the_policy_that_decided_decides_the_same(policy: str) -> None:
    (row,) = redecide(list(recorded(policy)), {policy: FACTORIES[policy]}, seed=9)
    assert (row.decisions, row.same) == (80, 80)
    assert row.ttft_s == row.recorded_ttft_s
    assert row.matched_tokens == row.recorded_matched_tokens


def test_another_policy_decides_otherwise() -> None:
    (row,) = redecide(list(recorded("cost")), {"round_robin": FACTORIES["round_robin"]}, seed=9)
    assert row.same < 60
    assert row.ttft_s > row.recorded_ttft_s
    assert row.matched_tokens < row.recorded_matched_tokens


@cache
def traffic(policy: str = "round_robin", model: WorkerModel = TRUE) -> list[Traced]:
    """Simulated workers of a known model, as a gateway would have recorded them."""
    rng = Random(4)
    systems = [[BlockKey(rng.getrandbits(62)) for _ in range(60)] for _ in range(5)]
    asked = []
    for number in range(400):
        keys = [*rng.choice(systems), *(BlockKey(rng.getrandbits(62)) for _ in range(40))]
        asked.append(_traced(number, keys[: rng.randrange(65, 100)], "", None, 0))
    trace = trace_of(asked, 16)
    run = Replay(trace, model, 3, FACTORIES[policy], 1.0, 1).run()
    return [
        _traced(at, list(map(BlockKey, one.keys)), f"w{run.worker[at]}", run.ttft_s[at], cached)
        for at, (one, cached) in enumerate(zip(asked, run.cached_tokens, strict=True))
    ]


def _traced(at: int, keys: list[BlockKey], worker: str, ttft: float | None, cached: int) -> Traced:
    tokens = 16 * len(keys) + 5
    query = Query(RequestId(f"r{at}"), "m", tokens, 8, START + 0.12 * at, keys)
    line = TraceEncoder(1, b"").encode(
        query,
        told(
            at=query.arrived,
            request_id=query.request_id,
            worker=worker,
            ttft_s=ttft,
            itl_s=0.0102,
            total_s=(ttft or 0.0) + 0.08,
            output_tokens=8,
            flow=hit(tokens, cached),
        ),
    )
    return TraceDecoder().decode(line)


def test_speed_and_memory_are_found_in_recorded_times() -> None:
    requests = traffic()
    fitted = fit_speed(requests, WorkerModel(kv_blocks=1))
    assert fitted.prefill_tokens_per_s == pytest.approx(5_000, rel=0.1)
    assert fitted.overhead_s == pytest.approx(0.02, abs=0.01)
    assert fitted.token_s == pytest.approx(0.0102, rel=0.01)
    places = {at: int(one.worker[1:]) for at, one in enumerate(requests)}
    delivered = sum(one.cached_tokens for one in requests)
    blocks = fit_memory(trace_of(requests, 16), fitted, 3, places, delivered)
    assert blocks == pytest.approx(TRUE.kv_blocks, rel=0.15)


def test_memory_that_was_never_full_is_not_taken_for_small() -> None:
    roomy = msgspec.structs.replace(TRUE, kv_blocks=20_000)
    requests = traffic("cost", roomy)
    result = replay("x", requests, {"round_robin": FACTORIES["round_robin"]}, block_size=16)
    assert result.memory_from == "fitted"
    truly = traffic("round_robin", roomy)
    measured = sum(one.ttft_s or 0.0 for one in truly) / len(truly)
    foretold = result.served[-1]
    assert foretold.ttft.mean_s == pytest.approx(measured, rel=0.15)
    hits = sum(one.cached_tokens for one in truly) / sum(one.prompt_tokens for one in truly)
    assert foretold.hit_rate == pytest.approx(hits, abs=0.01)


def test_memory_that_workers_told_is_believed() -> None:
    requests = []
    for one in recorded("cost"):
        sized = tuple(
            msgspec.structs.replace(
                candidate,
                worker=msgspec.structs.replace(candidate.worker, kv_tokens_total=320_000),
            )
            for candidate in one.candidates
        )
        requests.append(replace(one, candidates=sized))
    result = replay("x", requests, {"cost": FACTORIES["cost"]}, block_size=16)
    assert (result.memory_from, result.model.kv_blocks) == ("told", 20_000)
    assert told_memory(traffic(), 16) == 0


def test_too_few_samples_fit_nothing() -> None:
    default = WorkerModel(kv_blocks=7)
    assert fit_speed(traffic()[:10], default).prefill_tokens_per_s == default.prefill_tokens_per_s


def test_a_replay_comes_near_what_was_measured_and_what_another_policy_would_measure() -> None:
    policies = {name: FACTORIES[name] for name in ("cost", "round_robin")}
    result = replay("x", traffic(), policies, block_size=16)
    rows = {row.policy: row for row in result.served}
    assert result.measured.ttft is not None
    assert rows["recorded"].ttft.mean_s == pytest.approx(result.measured.ttft.mean_s, rel=0.15)
    assert rows["recorded"].hit_rate == pytest.approx(result.measured.hit_rate, abs=0.02)
    assert rows["recorded"].saved_s == 0.0
    assert "-0.0 s" not in to_text(result, colour=False)
    truly = traffic("cost")
    measured = sum(one.ttft_s or 0.0 for one in truly) / len(truly)
    assert rows["cost"].ttft.mean_s == pytest.approx(measured, rel=0.15)
    assert rows["cost"].saved_s > 0
    assert result.decided == []  # no candidates were kept


def ledger(folder: Path, records: list[tuple[Query, RequestRecord]]) -> Path:
    from gateway.decision import Overlap, Route

    sink = TraceSink(LedgerConfig(dir=str(folder), trace=True, decisions=True), "1")
    for query, record in records:
        sink.record(Route(query, "cost", (), Overlap(), 0.0, 0.0), record)
    sink.close()
    return folder


def test_the_command(tmp_path: Path) -> None:
    keys = [BlockKey(n) for n in range(1, 30)]
    records = [
        (
            Query(RequestId(f"r{n}"), "m", 16 * 29 + 3, 8, START + n, keys),
            told(
                request_id=f"r{n}",
                at=START + n,
                output_tokens=8,
                ttft_s=0.05,
                total_s=0.2,
                flow=hit(16 * 29 + 3, 0),
            ),
        )
        for n in range(20)
    ]
    folder = ledger(tmp_path / "l", records)
    shown = CliRunner().invoke(app, [str(folder), "--policy", "cost,round_robin"])
    assert shown.exit_code == 0, shown.exception
    assert "20 requests by cost on 1 worker" in shown.stdout
    assert "decisions was off" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    made = CliRunner().invoke(app, [str(folder), "--format", "json", "--kv-blocks", "64"])
    value = json.loads(made.stdout)
    assert value["served"][0]["policy"] == "recorded"
    assert value["model"]["kv_blocks"] == 64


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["{folder}"], "LEDGER"),
        (["/nowhere/at/all"], "LEDGER"),
        (["{folder}", "--format", "html"], "--format"),
        (["{folder}", "--kv-blocks", "-1"], "--kv-blocks"),
        (["{folder}", "--policy", "nonsense"], "--policy"),
        (["{file}"], "LEDGER"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], key: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(msgspec.json.encode({"a": 1}))
    folder = tmp_path / "empty"
    folder.mkdir()
    result = CliRunner().invoke(app, [one.format(folder=folder, file=file) for one in arguments])
    assert isinstance(result.exception, ConfigError), result.exception
    assert key in str(result.exception)


def test_requests_of_another_model_are_left_out() -> None:
    one = _traced(1, [BlockKey(1)] * 1, "w", 0.1, 0)
    assert answered([one], model="m") == [one]
