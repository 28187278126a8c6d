"""Rules of other routers, each on what its description says."""

from __future__ import annotations

from collections import Counter
from math import exp
from random import Random
from typing import Any

import pytest
from policykit import query, view

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query, Scored
from gateway.routing.catalogue import FACTORIES, make_policies
from shared.errors import ConfigError


def ranked(
    name: str, asked: Query, fleet: list[Candidate], seed: int = 0, **options: Any
) -> list[Scored]:
    policy = make_policies(RoutingConfig(options={name: options}))[name]
    return policy.rank(asked, fleet, Random(seed))


def first(name: str, asked: Query, fleet: list[Candidate], **options: Any) -> str:
    return ranked(name, asked, fleet, **options)[0].candidate.worker.id


@pytest.mark.parametrize(
    ("matched", "busy", "idle", "expected"),
    [
        (301, 60, 0, "holder"),  # more than 0.3 of 1,000 tokens
        (300, 60, 0, "idle"),
        (900, 65, 0, "idle"),  # more than 64 apart, and more than 1.5 x
        (900, 64, 0, "holder"),
        (900, 300, 200, "holder"),  # 100 apart, but not more than 1.5 x
        (900, 301, 200, "idle"),
    ],
)
def test_cache_aware_follows_its_thresholds(
    matched: int, busy: int, idle: int, expected: str
) -> None:
    holder = Candidate(view("holder", inflight=busy), matched)
    other = Candidate(view("idle", inflight=idle), 0)
    assert first("cache_aware", query(), [holder, other]) == expected


def test_cache_aware_takes_the_librarys_thresholds_too() -> None:
    library = {"match_threshold": 0.5, "balance_abs": 32, "balance_rel": 1.1}
    idle = Candidate(view("idle"), 0)
    assert first("cache_aware", query(), [Candidate(view("a"), 501), idle], **library) == "a"
    assert first("cache_aware", query(), [Candidate(view("a", inflight=1), 400), idle]) == "a"
    short = [Candidate(view("a", inflight=1), 400), idle]
    assert first("cache_aware", query(), short, **library) == "idle"
    busy = [Candidate(view("a", inflight=33), 900), idle]
    assert first("cache_aware", query(), busy) == "a"
    assert first("cache_aware", query(), busy, **library) == "idle"


def dynamo_fleet() -> list[Candidate]:
    """Of 992 tokens (62 blocks) the holder has 32 blocks and 100 busy ones."""
    holder = view("holder", booked_prefill_s=0.0, booked_decode_tokens=1600)
    return [Candidate(holder, 512), Candidate(view("idle"), 0)]


def test_dynamo_linear_adds_prefill_left_and_blocks_in_use() -> None:
    asked = query(tokens=992)
    holder, idle = dynamo_fleet()
    costs = {s.candidate.worker.id: s.cost for s in ranked("dynamo_linear", asked, [holder, idle])}
    assert costs == {"holder": (62 - 32) + (100 + 62), "idle": 62 + 62}
    assert first("dynamo_linear", asked, [holder, idle]) == "idle"
    assert first("dynamo_linear", asked, [holder, idle], prefill_load_scale=4) == "holder"


def test_dynamo_counts_host_memory_less_and_never_below_nothing() -> None:
    asked = query(tokens=512)
    fleet = [Candidate(view("host"), 512, host_tokens=512), Candidate(view("device"), 512)]
    costs = {
        s.candidate.worker.id: s.parts["prefill"] for s in ranked("dynamo_linear", asked, fleet)
    }
    assert costs == {"host": pytest.approx(32 * 0.25), "device": 0.0}
    none = ranked("dynamo_linear", asked, [Candidate(view("a"), 10_000)])
    assert none[0].parts["prefill"] == 0.0


def test_dynamo_draws_with_the_weights_of_its_temperature() -> None:
    asked = query(tokens=992)
    low = Candidate(view("low"), 496)
    middle = Candidate(view("middle"), 248)
    high = Candidate(view("high"), 0)
    fleet, temperature, draws = [high, low, middle], 0.5, 4000
    weights = [exp(-x / temperature) for x in (0.0, 0.5, 1.0)]
    counts = Counter(
        ranked("dynamo_linear", asked, fleet, seed, temperature=temperature)[0].candidate.worker.id
        for seed in range(draws)
    )
    for name, weight in zip(("low", "middle", "high"), weights, strict=True):
        assert counts[name] / draws == pytest.approx(weight / sum(weights), abs=0.03)
    assert {first("dynamo_linear", asked, fleet, temperature=1e-6)} == {"low"}


def test_lmetric_multiplies_prefill_left_and_blocks_in_use() -> None:
    asked = query(tokens=992)
    holder = Candidate(view("holder", booked_decode_tokens=160), 512)
    idle = Candidate(view("idle", booked_prefill_s=0.0992), 0)
    costs = {s.candidate.worker.id: s.cost for s in ranked("lmetric", asked, [holder, idle])}
    assert costs == {"holder": 30 * 11, "idle": pytest.approx(62 + 62)}
    assert first("lmetric", asked, [holder, idle]) == "idle"


def test_two_choices_compares_two_and_spreads() -> None:
    fleet = [Candidate(view(f"w{n}", inflight=n), 0) for n in range(8)]
    counts = Counter(
        ranked("two_choices", query(), fleet, seed)[0].candidate.worker.id for seed in range(4000)
    )
    assert counts["w7"] == 0, "the busiest loses against any other"
    for n in range(8):
        assert counts[f"w{n}"] / 4000 == pytest.approx((7 - n) / 28, abs=0.03)


def session_query(session: str, tenant: str = "", number: int = 0) -> Query:
    asked = query(number)
    return Query(
        request_id=asked.request_id,
        model="m",
        prompt_tokens=1000,
        max_tokens=0,
        arrived=0.0,
        session=session,
        tenant=tenant,
    )


def test_a_session_stays_and_only_the_lost_workers_sessions_move() -> None:
    fleet = [Candidate(view(f"w{n}", inflight=50 if n == 0 else 0), 0) for n in range(5)]
    names = [f"s{n}" for n in range(300)]
    home = {name: first("session", session_query(name), fleet) for name in names}
    again = {name: first("session", session_query(name, number=7), fleet[::-1]) for name in names}
    assert again == home
    counts = Counter(home.values())
    assert min(counts.values()) > 300 / 5 / 2
    moved = [
        name for name in names if first("session", session_query(name), fleet[1:]) != home[name]
    ]
    assert {home[name] for name in moved} == {"w0"}
    plan = ranked("session", session_query(names[0]), fleet)
    without = [item for item in fleet if item.worker.id != home[names[0]]]
    assert first("session", session_query(names[0]), without) == plan[1].candidate.worker.id


def test_sessions_belong_to_their_tenant_and_none_goes_by_load() -> None:
    fleet = [Candidate(view(f"w{n}", inflight=n), 0) for n in range(5)]
    pairs = [(f"s{n}", tenant) for n in range(40) for tenant in ("", "a", "b")]
    placed = {pair: first("session", session_query(*pair), fleet) for pair in pairs}
    for one, other in (("", "a"), ("a", "b")):
        assert any(placed[f"s{n}", one] != placed[f"s{n}", other] for n in range(40))
    # a tenant's name and a session's are not glued together
    glued = [first("session", session_query(f"b{n}", "a"), fleet) for n in range(40)]
    assert glued != [first("session", session_query(f"{n}", "ab"), fleet) for n in range(40)]
    assert first("session", session_query(""), fleet) == "w0"


@pytest.mark.parametrize(
    ("policy", "options", "key"),
    [
        ("cache_aware", {"match_threshold": 2}, "routing.options.cache_aware.match_threshold"),
        ("cache_aware", {"match": 0.3}, "routing.options.cache_aware"),
        ("longest_prefix", {"load_slack": -1}, "routing.options.longest_prefix.load_slack"),
        ("dynamo_linear", {"temperature": "hot"}, "routing.options.dynamo_linear.temperature"),
        *((name, {"sharpness": 1}, f"routing.options.{name}") for name in FACTORIES),
    ],
)
def test_options_that_do_not_fit_are_named(policy: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policies(RoutingConfig(options={policy: options}))
    assert str(error.value).startswith(key)
