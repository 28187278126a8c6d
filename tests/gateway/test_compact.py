"""The storage for large tables against the one for small ones, while it is being rebuilt."""

from __future__ import annotations

import random

import pytest

from gateway.index.cells import WIDTH, Cells, as_keys
from gateway.index.compact import CompactHoldings
from gateway.index.holdings import Holdings
from shared.types import WorkerId


@pytest.mark.parametrize("seed", range(4))
def test_both_storages_say_the_same(seed: int) -> None:
    rng = random.Random(seed)
    small, large = Holdings(), CompactHoldings()
    pairs = []
    prompts = [[rng.getrandbits(64) for _ in range(rng.choice([3, 60, 300]))] for _ in range(60)]
    prompts += [[0, 1, 2, (1 << 64) - 2], list(range(500))]
    for step in range(600):
        if len(pairs) < 5 or (rng.random() < 0.03 and len(pairs) < 12):
            name, lower = WorkerId(f"w{step}"), rng.random() < 0.2
            pairs.append((small.open(name, lower=lower), large.open(name, lower=lower)))
        at = rng.randrange(len(pairs))
        prompt = rng.choice(prompts)
        piece = prompt[: rng.randrange(len(prompt) + 1)]
        if rng.random() < 0.2:
            piece = [*piece, *piece]
        what = rng.random()
        if what < 0.55:
            small.add(pairs[at][0], piece)
            large.add(pairs[at][1], piece)
        elif what < 0.9:
            small.remove(pairs[at][0], piece)
            large.remove(pairs[at][1], piece)
        elif what < 0.93:
            small.abandon(pairs[at][0])
            large.abandon(pairs[at][1])
            pairs.pop(at)
        if step % 20 == 0:
            large.sweep(3000)
            large.check()
        if step % 7 == 0:
            wanted = rng.choice(prompts)
            few = rng.sample(wanted, 3)
            holding = [
                [h.holds_any(p[n], few) for p in pairs] for n, h in enumerate((small, large))
            ]
            assert holding[0] == holding[1]
            assert told(small, wanted) == told(large, wanted)
            large.settle()
            assert [p[0].count for p in pairs] == [p[1].count for p in pairs]
            assert small.entries == large.entries
            wanted = rng.choice(prompts)
            assert told(small, wanted) == told(large, wanted)
            lower = [sorted(s.worker for s in h.lower_at(wanted[0])) for h in (small, large)]
            assert lower[0] == lower[1]
    adopted = CompactHoldings.adopt(small)
    adopted.check()
    for prompt in prompts:
        assert told(small, prompt) == told(adopted, prompt) == told(large, prompt)


def test_changes_that_were_put_off_are_seen_at_once_and_counted_once_they_are_carried_out() -> None:
    rng = random.Random(4)
    small, large = Holdings(), CompactHoldings()
    pairs = [(small.open(WorkerId(name)), large.open(WorkerId(name))) for name in "abc"]
    prompts = [[rng.getrandbits(64) for _ in range(rng.randrange(1, 90))] for _ in range(40)]
    held = [[0] * len(prompts) for _ in pairs]
    for _ in range(1500):
        who, which = rng.randrange(len(pairs)), rng.randrange(len(prompts))
        depth, goal = held[who][which], rng.randrange(len(prompts[which]) + 1)
        held[who][which] = goal
        for holdings, slot in zip((small, large), pairs[who], strict=True):
            if goal > depth:
                holdings.add(slot, prompts[which][depth:goal], nested=True)
            else:
                holdings.remove(slot, prompts[which][goal:depth], nested=True)
        assert large.bound >= small.entries
        seen = rng.randrange(len(prompts))
        assert told(small, prompts[seen]) == told(large, prompts[seen])
    assert large._waiting
    large.settle()
    assert not large._waiting
    assert [one.count for one, _ in pairs] == [other.count for _, other in pairs]
    large.check()


def told(holdings: Holdings, keys: list[int]) -> list[tuple[int, list[str]]]:
    """Where whose match ends."""
    return [(d, sorted(holdings.workers_in(mask))) for d, mask in holdings.depths(keys)]


def test_memory_per_key_and_the_work_of_one_step() -> None:
    rng = random.Random(1)
    large = CompactHoldings()
    slots = [large.open(WorkerId(f"w{n}")) for n in range(8)]
    n = 0
    while n < 300_000:
        keys = [rng.getrandbits(64) for _ in range(500)]
        n += 500
        for slot in slots:
            large.add(slot, keys)
    while not large.swept:
        large.sweep(10_000)
    assert large.keys == n
    assert large.nbytes / n < 30
    for slot in slots[1:]:
        large.abandon(slot)
    while not large.swept:
        large.sweep(10_000)
    assert large.keys == n
    assert large.entries == n
    assert len(large._sets) == 1
    large.abandon(slots[0])
    assert large.nbytes < 20_000


def test_what_is_dropped_has_few_holders_and_the_books_balance() -> None:
    rng = random.Random(5)
    large = CompactHoldings()
    one, two = large.open(WorkerId("one")), large.open(WorkerId("two"))
    both = [rng.getrandbits(64) for _ in range(20_000)]
    alone = [rng.getrandbits(64) for _ in range(20_000)]
    large.add(one, both)
    large.add(two, both)
    large.add(one, alone)
    large.drop(8_000, rng)
    large.check()
    assert abs(large.entries - 52_000) < 100
    assert two.count > 19_000
    large._start_rebuild(0)
    large._move(700)
    large.drop(30_000, rng)
    large.check()
    assert abs(large.entries - 22_000) < 1_000
    large.drop(1_000_000, rng)
    large.check()
    assert large.entries < 2_000


def test_under_churn_at_the_cap_keys_stay_evenly_spread() -> None:
    rng = random.Random(6)
    large = CompactHoldings()
    slot = large.open(WorkerId("w"))
    for _ in range(300):
        large.add(slot, [rng.getrandbits(64) for _ in range(100)])
        large.drop(max(0, large.entries - 4_000), rng)
    cells = large._cells
    full = cells.values.reshape(-1, WIDTH)[:, -1] != 0
    assert full.mean() < 0.35
    taken = (cells.values > 1).reshape(4, -1).sum(axis=1) if cells.size % 4 == 0 else None
    assert taken is None or taken.min() > 0.8 * taken.mean()


def test_keys_that_share_a_bucket_overflow_into_the_next_ones() -> None:
    cells = Cells(64)
    by_bucket: dict[int, list[int]] = {}
    for key in range(1, 4000):
        by_bucket.setdefault(cells._bucket(key), []).append(key)
    crowd = by_bucket[cells.buckets - 1][:20]
    cells.put_all(as_keys(crowd[:12]), as_keys(range(2, 14)).astype("uint32"))
    for value, key in enumerate(crowd[12:], start=14):
        cells.put(key, value)
    found = cells.find_all(as_keys(crowd + by_bucket[3][:5]))
    assert [cells.value(at) for at in found[:20].tolist()] == list(range(2, 22))
    assert set(found[20:].tolist()) == {-1}
    assert [cells.find(key) for key in crowd] == found[:20].tolist()
    assert cells.find(by_bucket[3][0]) is None
    assert cells.used == 20
