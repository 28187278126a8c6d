"""The policies by name, each on what it promises."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from policykit import query, view
from routerkit import Rig, ok

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query, Trust
from gateway.routing.catalogue import make_policies
from gateway.routing.cost import CostModel, CostPolicy
from gateway.routing.rates import PrefillSample, RateBook
from shared.types import WorkerId


def first(name: str, asked: Query, *candidates: Candidate) -> str:
    policy = make_policies(RoutingConfig())[name]
    return policy.rank(asked, candidates, Random(0))[0].candidate.worker.id


def test_round_robin_takes_turns_over_a_changing_fleet() -> None:
    policy = make_policies(RoutingConfig())["round_robin"]
    fleet = [Candidate(view(name), 0) for name in ("a", "b", "c")]

    def turn(pool: list[Candidate]) -> str:
        return policy.rank(query(), pool, Random(0))[0].candidate.worker.id

    assert [turn(fleet) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    assert [turn(fleet[1:]) for _ in range(3)] == ["b", "c", "b"]
    assert turn(fleet) == "a"


def test_least_loaded_sees_others_requests_and_booked_work() -> None:
    busy = Candidate(view("a", foreign=2), 900)
    light = Candidate(view("b", inflight=1, booked_prefill_s=3.0), 0)
    lighter = Candidate(view("c", inflight=1, booked_prefill_s=1.0), 0)
    assert first("least_loaded", query(), busy, light, lighter) == "c"


def test_longest_prefix_goes_for_the_match_then_for_the_load() -> None:
    loaded = Candidate(view("a", inflight=8, booked_prefill_s=9.0), 512)
    same = Candidate(view("b", inflight=7), 512)
    idle = Candidate(view("c"), 496)
    assert first("longest_prefix", query(), loaded, same, idle) == "b"


def test_longest_prefix_passes_over_a_buried_holder() -> None:
    for busy, least, expected in ((8, 0, "holder"), (9, 0, "other"), (23, 10, "holder")):
        holder = Candidate(view("holder", inflight=busy), 512)
        other = Candidate(view("other", inflight=least), 16)
        assert first("longest_prefix", query(), holder, other) == expected
        ranked = make_policies(RoutingConfig())["longest_prefix"].rank(
            query(), [holder, other], Random(0)
        )
        assert len(ranked) == 2, "it stays in the retry plan"


def test_prefix_hash_keeps_prefixes_together_within_the_bound() -> None:
    config = RoutingConfig(prefix_hash_tokens=64, prefix_hash_load_factor=1.25)
    policy = make_policies(config)["prefix_hash"]
    fleet = [Candidate(view(f"w{n}"), 0) for n in range(5)]

    def place(keys: tuple[int, ...], pool: list[Candidate]) -> str:
        return policy.rank(query(keys=keys), pool, Random(0))[0].candidate.worker.id

    prompts = [(n, n + 1, n + 2, n + 3) for n in range(1, 4000, 10)]
    home = {prompt: place(prompt, fleet) for prompt in prompts}
    assert all(place((*prompt, 7, 8), fleet) == home[prompt] for prompt in prompts)
    counts = Counter(home.values())
    assert len(counts) == 5
    assert max(counts.values()) < 2 * len(prompts) / 5
    moved = [prompt for prompt in prompts if place(prompt, fleet[:4]) != home[prompt]]
    assert {home[prompt] for prompt in moved} == {"w4"}, "only the lost worker's prompts move"
    hot = prompts[0]
    full = [
        Candidate(view(item.worker.id, inflight=10 if item.worker.id == home[hot] else 1), 0)
        for item in fleet
    ]
    assert place(hot, full) != home[hot]


def test_cost_weighs_waiting_against_recomputing() -> None:
    for wait, expected in ((0.05, "holder"), (0.2, "idle")):
        holder = Candidate(view("holder", booked_prefill_s=wait, inflight=1), 992)
        idle = Candidate(view("idle"), 0)
        assert first("cost", query(), holder, idle) == expected


def test_what_lies_in_host_memory_costs_its_loading() -> None:
    model = CostModel()
    device = Candidate(view("device", host_s_per_token=2e-5), 960)
    host = Candidate(view("host", host_s_per_token=2e-5), 960, host_tokens=480)
    nothing = Candidate(view("nothing", host_s_per_token=2e-5), 0)
    asked = query()
    loading = model.compute_s(asked, host) - model.compute_s(asked, device)
    assert loading == pytest.approx(480 * 2e-5)
    assert model.price(asked, host)[1]["own"] == pytest.approx(
        model.price(asked, device)[1]["own"] + loading
    )
    assert first("cost", asked, nothing, host, device) == "device"
    assert first("cost", asked, nothing, host) == "host"


def test_loading_never_costs_more_than_computing() -> None:
    slow = Candidate(view("slow", host_s_per_token=1.0), 960, host_tokens=960)
    assert slow.load_s == pytest.approx(960 * slow.worker.prefill_s_per_token)


def test_loading_is_no_investment_in_a_popular_prefix() -> None:
    model = CostModel()
    plain = Candidate(view("a", host_s_per_token=2e-5), 480, host_tokens=480)
    popular = Candidate(view("a", host_s_per_token=2e-5), 480, shared_tokens=1e6, host_tokens=480)
    assert model.lost_s(query(), plain) > model.lost_s(query(), popular)
    assert model.lost_s(query(), popular) == pytest.approx(480 * 2e-5)


def test_of_a_half_popular_prefix_half_the_computing_counts() -> None:
    model = CostModel()
    half = Candidate(view("a", host_s_per_token=2e-5), 480, shared_tokens=260, host_tokens=480)
    compute = model.compute_s(query(), half)
    assert half.load_s < model.lost_s(query(), half) < compute
    assert model.lost_s(query(), half) == pytest.approx((compute + half.load_s) / 2)


def test_the_parts_have_their_names_and_memory_delays_the_first_token() -> None:
    model = CostModel()
    worker = view("b", kv_tokens_total=1000, booked_decode_tokens=900, release_tokens_per_s=100.0)
    full = Candidate(worker, 0, new_kv_tokens=600)
    terms = model.price(query(), full)[1]
    assert set(terms) == {"wait", "own", "others", "behind", "home", "memory", "decode"}
    assert terms["memory"] > 0
    expected = worker.booked_prefill_s + model.own_s(query(), full) + terms["memory"]
    assert model.expected_ttft_s(query(), full) == pytest.approx(expected)


def test_cost_grows_with_the_square_of_long_prompts() -> None:
    model = CostModel(quadratic=2e-5)
    assert model.prefill_s(1000, 1000, 1e-4) == pytest.approx(0.101)
    assert model.prefill_s(1000, 100_000, 1e-4) > 2.9 * model.prefill_s(1000, 1000, 1e-4)
    assert model.prefill_s(0, 1000, 1e-4) == 0.0


def test_a_popular_prefix_is_no_reason_to_wait_for_its_holder() -> None:
    holder = Candidate(view("holder", booked_prefill_s=0.02, inflight=1), 960)
    for shared, expected in ((0.0, "holder"), (950.0, "idle")):
        idle = Candidate(view("idle"), 0, shared_tokens=shared, branches=20.0)
        ranked = make_policies(RoutingConfig())["cost"].rank(query(), [holder, idle], Random(0))
        assert ranked[0].candidate.worker.id == expected
    assert CostModel().expected_ttft_s(query(), idle) > 0.1, "it still takes its time"


def test_a_prefix_on_its_way_gets_no_copy_that_does_not_pay() -> None:
    """Prefill of 960 of 1000 tokens takes 0.097 s; twenty prompts went on below it."""
    copy = Candidate(view("idle"), 0, shared_tokens=950.0, branches=20.0)
    for queue, expected in {0.0971: "holder", 0.12: "idle"}.items():
        busy = view("holder", booked_prefill_s=queue, inflight=1)
        leader = Candidate(busy, 960, promised_tokens=960)
        assert first("cost", query(), leader, copy) == expected
    alone = Candidate(view("a"), 0, shared_tokens=950.0, branches=20.0)
    other = Candidate(view("b", booked_prefill_s=0.01), 0, shared_tokens=950.0, branches=20.0)
    assert first("cost", query(), alone, other) == "a", "nobody holds it yet"


def test_a_busy_pool_affords_fewer_copies() -> None:
    for busy, expected in ((0.0, "idle"), (0.5, "holder"), (3.0, "holder")):
        holder = Candidate(view("holder", booked_prefill_s=0.3, pool_busy=busy), 992)
        idle = Candidate(view("idle", pool_busy=busy), 0)
        assert first("cost", query(), holder, idle) == expected
    model = CostModel()
    rising = [model.externality(view("a", pool_busy=share / 100)) for share in range(200)]
    assert rising == sorted(rising)
    assert (rising[0], rising[-1]) == (model.least, model.most)


def test_cost_avoids_a_worker_that_fails_and_one_without_memory() -> None:
    policy = CostPolicy(CostModel())
    shaky = Candidate(view("a", failure_rate=0.2), 0)
    full = Candidate(
        view("b", kv_tokens_total=1000, booked_decode_tokens=900, release_tokens_per_s=100.0),
        0,
        new_kv_tokens=600,
    )
    good = Candidate(view("c"), 0)
    ranked = policy.rank(query(), [shaky, full, good], Random(0))
    assert [item.candidate.worker.id for item in ranked] == ["c", "a", "b"]
    assert ranked[2].parts["memory"] == pytest.approx(5.0)
    assert ranked[1].parts["failure"] > 0


@pytest.mark.parametrize(("rate", "odds"), [(0.0, 0.0), (0.2, 0.25), (0.5, 1.0), (0.95, 9.0)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_failure_costs_its_time_and_the_best_of_the_others(
    rate: float, odds: float, place: int
) -> None:
    """However many there are and wherever the shaky one stands among them."""
    waits = [0.3, 0.1, 0.2]
    views = [view(f"w{at}", booked_prefill_s=wait) for at, wait in enumerate(waits)]
    candidates = [Candidate(one, 0) for one in views]
    sure = {one.candidate.worker.id: one.cost for one in
            CostPolicy(CostModel()).rank(query(), candidates, Random(0))}  # fmt: skip
    shaky = view(f"w{place}", booked_prefill_s=waits[place], failure_rate=rate, failure_s=2.0)
    candidates[place] = Candidate(shaky, 0)
    ranked = CostPolicy(CostModel()).rank(query(), candidates, Random(0))
    [found] = [one for one in ranked if one.candidate.worker.id == shaky.id]
    best = min(cost for name, cost in sure.items() if name != shaky.id)
    assert found.parts.get("failure", 0.0) == pytest.approx(odds * (2.0 + best))
    others = [one for one in ranked if one.candidate.worker.id != shaky.id]
    assert all(one.cost == pytest.approx(sure[one.candidate.worker.id]) for one in others)


def test_the_fifth_at_a_worker_waits_for_a_place() -> None:
    policy = CostPolicy(CostModel())
    for there, place_s in ((3, 0.0), (4, 2.0), (5, 4.0)):
        full = Candidate(view("a", inflight=there, service_s=8.0, at_once=4), 0)
        ranked = policy.rank(query(), [full, Candidate(view("b"), 0)], Random(0))
        assert ranked[1].parts.get("place", 0.0) == pytest.approx(place_s)


def test_one_of_a_hundred_requests_explores_the_second_best_holder() -> None:
    policy = CostPolicy(CostModel())
    fleet = [Candidate(view(name, trust=Trust.LEARNED), 960) for name in ("a", "b")]
    ranked = [policy.rank(query(number), fleet, Random(0)) for number in range(2000)]
    exploring = [order for order in ranked if any("explore" in one.parts for one in order)]
    assert 10 <= len(exploring) <= 40


def test_with_nothing_shared_cost_balances_like_least_loaded() -> None:
    worst = {}
    for policy in ("cost", "least_loaded"):
        rig = Rig(workers=8, policy=policy)
        leases = []
        for step in range(400):
            lease = rig.begin(rig.prompt(1 + step % 7))
            lease.first_token(rig.now)
            leases.append(lease)
            if len(leases) > 40:
                gone = leases.pop(step % 20)
                gone.finish(ok(), rig.now)
            rig.now += 0.01
        worst[policy] = max(rig.inflight().values())
    assert worst["cost"] <= worst["least_loaded"] + 1


def test_blind_workers_keep_prompts_together_while_they_are_equal() -> None:
    fleet = [Candidate(view(f"w{n}", trust=Trust.BLIND), 0) for n in range(4)]
    same = {first("cost", query(n, (1, 2, 3)), *fleet) for n in range(20)}
    assert len(same) == 1
    exact = [Candidate(view(f"w{n}"), 0) for n in range(4)]
    assert len({first("cost", query(n, (1, 2, 3)), *exact) for n in range(20)}) > 1


def sample(uncached: int, ttft_s: float, wait_s: float = 0.0) -> PrefillSample:
    return PrefillSample(uncached, uncached, ttft_s, wait_s)


def test_rates_before_and_after_the_first_samples() -> None:
    rates = RateBook(1e-4, CostModel(quadratic=0.0))
    a, b, c = WorkerId("a"), WorkerId("b"), WorkerId("c")
    assert rates.s_per_token("m", a) == 1e-4
    rates.report("m", a, 2000.0)
    assert rates.s_per_token("m", a) == pytest.approx(5e-4)
    assert rates.s_per_token("m", c) == pytest.approx(5e-4), "a new worker is like its pool"
    for _ in range(64):
        rates.observe("m", b, sample(1000, 1.005), 0.0)
    assert rates.s_per_token("m", b) == pytest.approx(1e-3, rel=0.2)
    assert rates.s_per_token("other", a) == 1e-4
    rates.forget("m", b)
    rates.forget("m", a)
    assert rates.s_per_token("m", b) == 1e-4


def test_small_differences_are_noise_and_equal_workers_equal() -> None:
    rates = RateBook(1e-4, CostModel(quadratic=0.0))
    rng = Random(5)
    for n in range(300):
        pace = 1e-3 * rng.uniform(0.8, 1.25)
        rates.observe("m", WorkerId(f"w{n % 4}"), sample(1000, 0.005 + 1000 * pace), 0.0)
    assert len({rates.s_per_token("m", WorkerId(f"w{n}")) for n in range(4)}) == 1


def test_requests_that_waited_teach_nothing() -> None:
    rates = RateBook(1e-4, CostModel())
    for _ in range(20):
        rates.observe("m", WorkerId("a"), sample(1000, 10.0, wait_s=9.0), 0.0)
        rates.observe("m", WorkerId("a"), sample(1000, 0.0), 0.0)
    assert rates.s_per_token("m", WorkerId("a")) == 1e-4


def test_tiny_prompts_alone_teach_rate_and_fixed_part() -> None:
    rates = RateBook(1e-4, CostModel(quadratic=0.0))
    for n in range(40):
        tokens = 20 + 5 * (n % 40)
        rates.observe("m", WorkerId("a"), sample(tokens, 0.03 + 1e-3 * tokens), 0.0)
    assert rates.s_per_token("m", WorkerId("a")) == pytest.approx(1e-3, rel=0.1)
    assert rates.overhead_s("m") == pytest.approx(0.03, rel=0.2)
