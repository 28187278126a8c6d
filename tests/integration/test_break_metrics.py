"""The metrics by name and label as documented, after every kind of end; and bounded series."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from rig import (
    CHAT,
    CUT,
    answer,
    ask,
    chat,
    completion,
    cut_stream,
    delta,
    eventually,
    stream,
    usage_event,
)

from gateway.records import RequestRecord
from gateway.telemetry import MAX_WORKERS, OTHER, PrometheusSink

LABELS = {
    "requests_total": "route model code",
    "attempts_total": "worker outcome",
    "prompt_tokens_total": "model source",
    "overlap_tokens_total": "model stage",
    "loss_tokens_total": "model reason",
    "lookups_total": "model result",
    "ttft_seconds": "model hit",
    "itl_seconds": "model",
    "request_seconds": "model",
    "decision_seconds": "stage",
    "overhead_seconds": "",
    "inflight": "worker",
    "queue_depth": "priority",
    "queue_seconds": "",
    "worker_state": "worker state",
    "worker_trust": "worker state",
    "worker_parity": "worker state",
    "prediction_error_tokens": "",
    "index_blocks": "worker",
    "index_host_blocks": "worker",
    "index_lag_seconds": "",
    "redis_up": "",
    "redis_configured": "",
    "engine_stream_total": "what",
    "engine_streams": "",
    "retries_total": "reason",
    "shed_total": "reason",
}
VALUES = {
    ("prompt_tokens_total", "source"): {"cached", "computed"},
    ("overlap_tokens_total", "stage"): {"available", "captured", "delivered"},
    ("lookups_total", "result"): {"too_short", "nothing_known", "not_chosen", "chosen"},
    ("ttft_seconds", "hit"): {"none", "partial", "full"},
    ("decision_seconds", "stage"): {"parse", "tokenize", "hash", "lookup", "rank"},
    ("worker_trust", "state"): {"exact", "learned", "blind"},
}


def series(text: str) -> dict[str, list[dict[str, str]]]:
    """Labels of all series by metric, without the ``headwater_`` prefix."""
    found: dict[str, list[dict[str, str]]] = {}
    for name, labels in re.findall(r"^headwater_(\w+?)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        base = re.sub(r"_(bucket|sum|count|created)$", "", name)
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        pairs.pop("le", None)
        found.setdefault(base, []).append(pairs)
    return found


async def test_names_labels_and_values(stub, serve) -> None:
    worker, other, second = await stub(), await stub(models=("z",)), await stub()
    served = await serve(worker, other, second)
    long = "x" * 400
    prompt = chat(long, stream=True)
    for script in (
        stream(delta("a"), delta("b"), usage_event(120, 2, 0)),
        stream(delta("a"), delta("b"), usage_event(120, 2, 96)),
        cut_stream(delta("a")),
        completion(),
        answer({"error": {"message": "x"}}, 400),
        [CUT],
    ):
        worker.plays(script)
        second.plays(script)
        await ask(served.url, CHAT, prompt)
    worker.plays(completion())
    await ask(served.url, CHAT, chat(model="nobody"))
    await other.stop()
    await eventually(lambda: any(w.reason for w in served.gateway.router.workers(0.0)))
    await ask(served.url, CHAT, chat(model="z"))
    found = series((await ask(served.admin, "/metrics")).body.decode())
    assert found.keys() | {"loss_tokens_total"} == LABELS.keys()
    for name, entries in found.items():
        for pairs in entries:
            assert set(pairs) == set(LABELS[name].split()), name
            for label, value in pairs.items():
                assert value in VALUES.get((name, label), {value}), (name, label, value)
    stages = {pairs["stage"] for pairs in found["decision_seconds"]}
    assert stages >= {"parse", "hash", "lookup", "rank"}  # no tokenizer here


def attempt_on(worker: str) -> RequestRecord:
    return RequestRecord(
        at=0.0,
        request_id="r",
        attempt=1,
        final=True,
        route="/",
        model="m",
        worker=worker,
    )


def test_workers_that_come_and_go_do_not_make_series_for_ever() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, known=lambda model: True)
    for number in range(MAX_WORKERS + 500):
        sink.record(attempt_on(f"10.0.{number}:1"))
    get = registry.get_sample_value
    workers = {
        s.labels["worker"] for m in registry.collect() for s in m.samples if "worker" in s.labels
    }
    assert len(workers) == MAX_WORKERS + 1
    assert get("headwater_attempts_total", {"worker": OTHER, "outcome": "ok"}) == 500
    assert get("headwater_attempts_total", {"worker": "10.0.0:1", "outcome": "ok"}) == 1


def test_series_of_a_worker_that_left_are_forgotten_and_begin_anew_when_it_returns() -> None:
    registry, here = CollectorRegistry(), {"a", "b"}
    sink = PrometheusSink(registry, known=lambda model: True, here=here.__contains__)

    def attempt(worker: str) -> None:
        sink.record(attempt_on(worker))

    def told(worker: str) -> float | None:
        return registry.get_sample_value(
            "headwater_attempts_total", {"worker": worker, "outcome": "ok"}
        )

    for _ in range(2):
        attempt("a")
        attempt("b")
    assert (told("a"), told("b")) == (2, 2)
    here.remove("a")
    assert (told("a"), told("b")) == (None, 2)
    here.add("a")
    attempt("a")
    assert (told("a"), told("b")) == (1, 2)
    for number in range(3 * MAX_WORKERS):
        here.add(f"w{number}")
        attempt(f"w{number}")
        here.remove(f"w{number}")
    attempt("b")
    assert told(OTHER) is None, "those who left make room"
    assert told("b") == 3
