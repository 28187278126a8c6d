"""Decisions over prompts that workers hold partly in host memory."""

from __future__ import annotations

import pytest
from routerkit import Rig

from shared.events import removed, stored
from shared.load import WorkerLoad
from shared.types import BlockKey, Tier, WorkerId

W1, W2 = WorkerId("w1"), WorkerId("w2")


def warm_host(rig: Rig, name: str, keys: list[BlockKey]) -> None:
    assert rig.feed(name, stored([int(key) for key in keys], None, Tier.HOST)) == "applied"


def test_host_memory_counts_as_held_and_is_told_apart() -> None:
    rig = Rig(workers=2)
    keys = rig.prompt(40)
    rig.warm("w1", keys[:10])
    warm_host(rig, "w1", keys[10:30])
    route = rig.route(keys)
    chosen = route.chosen.candidate
    assert (route.worker, route.matched_tokens) == ("w1", 30 * 16)
    assert (chosen.matched_tokens, chosen.host_tokens) == (30 * 16, 20 * 16)
    other = route.order[1].candidate
    assert chosen.new_kv_tokens == other.new_kv_tokens - 10 * 16, "loaded blocks need room too"
    status = {each.id: each for each in rig.router.workers(rig.now)}
    assert (status["w1"].index_blocks, status["w1"].index_host_blocks) == (10, 20)
    assert route.overlap.available_tokens == 30 * 16


def test_a_holder_on_the_device_is_preferred_to_one_in_host_memory() -> None:
    rig = Rig(workers=2)
    keys = rig.prompt(40)
    warm_host(rig, "w1", keys)
    assert rig.route(keys).worker == "w1"
    rig.warm("w2", keys)
    for _ in range(20):
        assert rig.route([*keys, *rig.prompt(1)]).worker == "w2"


def test_the_reported_rate_of_loading_replaces_the_assumed_one() -> None:
    rig = Rig(workers=2, host_s_per_token=5e-5)
    keys = rig.prompt(40)
    warm_host(rig, "w1", keys)
    assert rig.route(keys).chosen.candidate.load_s == pytest.approx(39 * 16 * 5e-5, rel=0.03)
    rig.router.apply_load(W1, WorkerLoad(host_tokens_per_s=1e6), rig.now)
    assert rig.route(keys).chosen.candidate.load_s == pytest.approx(39 * 16 * 1e-6, rel=0.03)


def test_what_host_memory_delivers_closes_the_books() -> None:
    rig = Rig(workers=1)
    keys = rig.prompt(20)
    rig.warm("w1", keys[:5])
    warm_host(rig, "w1", keys[5:])
    flow = rig.serve(keys, cached=20 * 16).flow
    flow.check()
    assert (flow.available, flow.captured, flow.delivered) == (320, 320, 320)
    assert (flow.stale_index, flow.gained, flow.cold) == (0, 0, 0)
    rig.feed("w1", removed([int(key) for key in keys[10:]], Tier.HOST))
    flow = rig.serve(keys, cached=10 * 16).flow
    flow.check()
    assert (flow.available, flow.captured, flow.delivered, flow.evicted) == (160, 160, 160, 160)
