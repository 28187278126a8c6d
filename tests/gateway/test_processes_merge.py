"""Several processes shown as one gateway: metrics, workers, the dashboard, changes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.counts import Counts, Distribution
from gateway.dashboard.live import Live
from gateway.processes.changes import Change, Changes
from gateway.processes.metrics import Totals
from gateway.processes.sockets import open_public, port_of
from gateway.processes.views import merge_states, merge_workers
from shared.errors import ConfigError


def shown(requests: int, *seconds: float, extra: str = "") -> list:
    registry = CollectorRegistry()
    counts = Counts(registry, "headwater_requests", "Text.", "code")
    counts.add(("200",), requests)
    times = Distribution(registry, "headwater_ttft_seconds", "Text.", (0.1, 1.0), "hit")
    for value in seconds:
        times.observe(value, ("none",))
    text = generate_latest(registry).decode() + extra
    return list(text_string_to_metric_families(text))


def values(totals: Totals, present: list[int]) -> dict[str, float]:
    found = {}
    for metric in totals.merged(present):
        for sample in metric.samples:
            found[f"{sample.name}{sorted(sample.labels.items())}"] = sample.value
    return found


def test_counters_and_histograms_are_sums() -> None:
    totals = Totals()
    totals.take(0, 0, shown(3, 0.05, 5.0))
    totals.take(1, 0, shown(4, 0.5))
    got = values(totals, [0, 1])
    assert got["headwater_requests_total[('code', '200')]"] == 7
    assert got["headwater_ttft_seconds_count[('hit', 'none')]"] == 3
    assert got["headwater_ttft_seconds_bucket[('hit', 'none'), ('le', '0.1')]"] == 1
    assert got["headwater_ttft_seconds_bucket[('hit', 'none'), ('le', '1.0')]"] == 2
    assert got["headwater_ttft_seconds_bucket[('hit', 'none'), ('le', '+Inf')]"] == 3


@pytest.mark.parametrize("present", [[0, 1], [0]], ids=["restarted", "away"])
def test_a_sum_never_falls_when_a_process_dies(present) -> None:
    totals = Totals()
    totals.take(0, 0, shown(3))
    totals.take(1, 0, shown(4))
    if 1 in present:
        totals.take(1, 1, shown(1))
    assert values(totals, present)["headwater_requests_total[('code', '200')]"] == 7 + (
        1 in present
    )


def gauges(inflight: int, blocks: int, ready: int, up: int) -> str:
    lines = [
        "# TYPE headwater_inflight gauge",
        f'headwater_inflight{{worker="w"}} {inflight}',
        "# TYPE headwater_index_blocks gauge",
        f'headwater_index_blocks{{worker="w"}} {blocks}',
        "# TYPE headwater_worker_state gauge",
        f'headwater_worker_state{{worker="w",state="ready"}} {ready}',
        f'headwater_worker_state{{worker="w",state="down"}} {1 - ready}',
        "# TYPE headwater_redis_up gauge",
        f"headwater_redis_up {up}",
    ]
    return "\n".join(lines) + "\n"


def test_gauges_follow_their_rules() -> None:
    totals = Totals()
    totals.take(0, 0, shown(0, extra=gauges(2, 10, 0, 1)))
    totals.take(1, 0, shown(0, extra=gauges(3, 12, 1, 0)))
    got = values(totals, [1, 0])
    assert got["headwater_inflight[('worker', 'w')]"] == 5
    assert got["headwater_index_blocks[('worker', 'w')]"] == 12
    assert got["headwater_worker_state[('state', 'ready'), ('worker', 'w')]"] == 1
    assert got["headwater_worker_state[('state', 'down'), ('worker', 'w')]"] == 0
    assert got["headwater_redis_up[]"] == 0
    assert "headwater_inflight[('worker', 'w')]" in values(totals, [0])
    assert values(totals, [0])["headwater_inflight[('worker', 'w')]"] == 2


def row(**more) -> dict:
    usual = {"id": "w", "state": "ready", "reason": "", "trust": "exact", "trust_reason": "ok"}
    return usual | {"inflight": 1, "requests": 2, "index_blocks": 5, "sources": ["static"]} | more


def test_workers_show_what_any_process_has_against_them() -> None:
    one = {"workers": [row()], "lists": [{"source": "dns", "fault": ""}]}
    two = {
        "workers": [
            row(state="draining", reason="asked", trust="blind", trust_reason="new", inflight=4),
            row(id="x", sources=["admin"]),
        ],
        "lists": [{"source": "dns", "fault": "no answer"}],
    }
    merged = merge_workers([one, two])
    first, second = merged["workers"]
    assert (first["state"], first["reason"], first["trust"]) == ("draining", "asked", "blind")
    assert (first["inflight"], first["requests"], first["index_blocks"]) == (5, 4, 5)
    assert second["id"] == "x"
    assert merged["lists"][0]["fault"] == "no answer"


def test_dashboards_of_different_age_are_added_by_their_ends() -> None:
    def state(requests: list[int]) -> dict:
        shown = Live(lambda: 0.0).shown()
        series = {"step_s": 10.0, "requests": requests, "ttft_hit_s": [None] * len(requests)}
        series["ttft_none_s"] = [float(n) for n in requests]
        rest = {"at": 1.0, "workers": [], "recent": [], "series": series}
        return shown | rest | {"reasons": {"a": sum(requests)}}

    merged = merge_states([state([1, 2, 3]), state([6])], 40)
    assert merged["series"]["requests"] == [1, 2, 9]
    assert merged["series"]["ttft_none_s"] == [1.0, 2.0, 5.0]
    assert merged["series"]["ttft_hit_s"] == [None] * 3
    assert merged["reasons"] == {"a": 12}


def test_the_last_word_about_a_worker_is_what_later_processes_are_told() -> None:
    changes = Changes()

    def note(worker: str, action: str) -> None:
        changes.note(Change("POST", f"/{worker}/{action}", None, worker, action))

    for worker, action in (("a", "add"), ("a", "drain"), ("b", "drain"), ("b", "undrain")):
        note(worker, action)
    assert [c.action for c in changes.all()] == ["add", "drain"]
    note("a", "remove")
    assert [(c.worker, c.action) for c in changes.all()] == [("a", "remove")]


def test_a_port_that_others_share_counts_as_taken() -> None:
    sockets = open_public("127.0.0.1", 0, 2)
    sockets[0][0].listen()
    try:
        with pytest.raises(ConfigError, match=r"listen\.port"):
            open_public("127.0.0.1", port_of(sockets), 2)
    finally:
        for mine in sockets:
            for sock in mine:
                sock.close()
