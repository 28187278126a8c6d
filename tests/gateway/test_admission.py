"""Who waits, who goes next and who is turned away: the queue alone, without clocks or sockets."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from routerkit import Rig

from gateway.admission import AdmissionQueue, Drain, Ticket, soon, with_room
from shared.load import WorkerLoad
from shared.types import WorkerId

OLDEST_EVERY = 8


def ticket(
    name: str = "a", priority: int = 0, at: float = 0.0, tokens: int = 100, model: str = "m"
) -> Ticket:
    return Ticket(model, priority, name, tokens, at, at + 1e9)


def serve_all(queue: AdmissionQueue) -> list[Ticket]:
    order = []
    while (one := queue.next()) is not None:
        queue.admit(one)
        order.append(one)
    return order


def test_the_more_urgent_overtake_and_equals_keep_their_order() -> None:
    queue = AdmissionQueue(100, OLDEST_EVERY)
    tickets = [ticket(priority=priority, at=at) for at, priority in enumerate([1, 0, 2, 0, 1])]
    for one in tickets:
        assert queue.enter(one) is None
    assert queue.depths() == {0: 2, 1: 2, 2: 1}
    assert serve_all(queue) == [tickets[n] for n in (1, 3, 0, 4, 2)]
    assert (len(queue), queue.depths()) == (0, {})


def test_tenants_share_by_tokens_not_by_requests() -> None:
    queue = AdmissionQueue(100, OLDEST_EVERY)
    for n in range(12):
        queue.enter(ticket("heavy", at=n, tokens=300))
    for n in range(12):
        queue.enter(ticket("light", at=20 + n, tokens=100))
    first = [one.tenant for one in serve_all(queue)[:12]]
    assert 8 <= first.count("light") <= 9, "three light ones weigh as much as a heavy one"


def test_a_pause_saves_nothing_up() -> None:
    queue = AdmissionQueue(1000, OLDEST_EVERY)
    for n in range(40):
        queue.enter(ticket("busy", at=n))
    for _ in range(20):
        one = queue.next()
        assert one is not None
        queue.admit(one)
    for n in range(20):
        queue.enter(ticket("newcomer", at=100 + n))
    served = [one.tenant for one in serve_all(queue)[:20]]
    assert 9 <= served.count("newcomer") <= 11


def test_what_was_really_served_is_paid_for() -> None:
    queue = AdmissionQueue(100, OLDEST_EVERY)
    greedy, modest = [[ticket(name, at=n) for n in range(3)] for name in ("greedy", "modest")]
    for one in (*greedy, *modest):
        queue.enter(one)
    queue.admit(greedy[0])
    queue.settle(greedy[0], 1000)
    assert [one.tenant for one in serve_all(queue)] == ["modest"] * 3 + ["greedy"] * 2


def test_a_full_queue_turns_the_least_urgent_away() -> None:
    queue = AdmissionQueue(3, OLDEST_EVERY)
    low, middle, high = ticket(priority=5), ticket(priority=1), ticket(priority=0)
    for one in (low, middle, high):
        assert queue.enter(one) is None
    newcomer = ticket(priority=9, at=1.0)
    assert queue.enter(newcomer) is newcomer
    assert queue.enter(ticket(priority=0, at=1.0)) is low
    assert len(queue) == 3


def test_a_full_queue_takes_from_the_tenant_that_fills_it() -> None:
    queue = AdmissionQueue(10, OLDEST_EVERY)
    flood = [ticket("flood", at=n) for n in range(10)]
    for one in flood:
        queue.enter(one)
    assert queue.enter(ticket("other", at=50)) is flood[-1]
    assert queue.enter(ticket("flood", at=60)) is not None
    assert queue.enter(ticket("other", at=70)) is flood[-2]


def test_a_model_without_room_does_not_hold_up_another() -> None:
    queue = AdmissionQueue(10, OLDEST_EVERY)
    first, second = ticket(model="big", at=0.0), ticket(model="small", at=1.0)
    queue.enter(first)
    queue.enter(second)
    assert queue.next() is first
    assert queue.next({"big"}) is second
    assert queue.next({"big", "small"}) is None
    assert queue.waiting("big")
    assert not queue.waiting("other")


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 500)), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_nothing_starves(patient: list[tuple[int, int]], seed: int) -> None:
    """Whatever keeps coming: more urgent, from new tenants each time, in small requests. One is
    served each second, and more arrive than are served."""
    queue, rng = AdmissionQueue(10**6, OLDEST_EVERY), Random(seed)
    waiting = [ticket("patient", priority, 0.0, tokens) for priority, tokens in patient]
    for one in waiting:
        queue.enter(one)
    left, now = set(map(id, waiting)), 0.0
    while left:
        assert now < 40 * OLDEST_EVERY, "it waits for ever"
        now += 1.0
        for n in range(2):
            queue.enter(ticket(f"new{now}{n}", rng.randint(-3, 3), now, rng.randint(1, 9)))
        one = queue.next()
        assert one is not None
        queue.admit(one)
        left.discard(id(one))


class Model:
    """The queue as a list."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "admit", "leave", "leave twice"]),
            st.integers(-2, 2),
            st.sampled_from("abc"),
            st.integers(1, 50),
        ),
        max_size=80,
    )
)
def test_the_books_balance(steps: list[tuple[str, int, str, int]]) -> None:
    queue, model, gone = AdmissionQueue(8, OLDEST_EVERY), Model(), None
    for now, (what, priority, tenant, tokens) in enumerate(steps):
        if what == "enter":
            one = ticket(tenant, priority, float(now), tokens)
            model.tickets.append(one)
            out = queue.enter(one)
            assert (out is not None) == (len(model.tickets) > 8)
            if out is not None:
                model.tickets.remove(out)
        elif what == "admit" and model.tickets:
            one_next = queue.next()
            assert one_next in model.tickets
            queue.admit(one_next)
            model.tickets.remove(one_next)
        elif what == "leave" and model.tickets:
            gone = model.tickets.pop(tokens % len(model.tickets))
            queue.leave(gone)
        elif gone is not None:
            queue.leave(gone)
        assert len(queue) == len(model.tickets) == sum(queue.depths().values())
        assert queue.waiting("m") == bool(model.tickets)
        waiting = {one.tenant for one in model.tickets}
        for name, books in queue._tenants.items():
            mine = [one.tokens for one in model.tickets if one.tenant == name]
            assert (books.waiting, books.tokens) == (len(mine), sum(mine))
        assert waiting <= queue._tenants.keys()


def test_how_long_to_wait_follows_the_drain() -> None:
    queue = AdmissionQueue(100, OLDEST_EVERY)
    assert queue.retry_after_s(0, 0.0) is None, "nothing is known yet"
    for n in range(11):
        queue.drain.release(n / 2)  # two a second
    for n in range(9):
        queue.enter(ticket(at=5.0, priority=n % 3))
    assert queue.retry_after_s(9, 5.0) == 5.0
    assert queue.retry_after_s(0, 5.0) == 2.0, "only the equally urgent go before it"
    assert queue.retry_after_s(0, 50.0) == 20.0, "nothing has left for a while"


def test_the_drain_keeps_the_last_releases_only() -> None:
    drain = Drain()
    for n in range(1000):
        drain.release(n / 100)
    for n in range(64):
        drain.release(10.0 + n)
    assert drain.seconds_for(10, 73.0) == 10.0


def test_room_is_counted_with_what_others_sent() -> None:
    rig = Rig(workers=2)
    keys = rig.prompt(4)
    rig.warm("w1", keys)
    assert (route := with_room(rig.route(keys), 2)) is not None
    assert route.worker == "w1"
    held = [rig.begin(keys), rig.begin(keys)]
    load = WorkerLoad(running=2, waiting=0, blocks_total=1000, blocks_used=10)
    rig.router.apply_load(WorkerId("w2"), load, rig.now)
    full = rig.route(keys)
    assert with_room(full, 2) is None
    assert with_room(full, 0) is full
    assert with_room(full, 3) is full
    rig.router.apply_load(WorkerId("w2"), WorkerLoad(blocks_total=1000), rig.now)
    moved = with_room(rig.route(keys), 2)
    assert moved is not None
    assert [scored.candidate.worker.id for scored in moved.order] == ["w2", "w1"]
    assert len(held) == 2


def test_soon_means_little_prefill_ahead_and_room_for_the_kv() -> None:
    rig = Rig(workers=1)
    long = rig.prompt(1000)

    def route(**load: Any) -> bool:
        rig.now += 0.01
        told = WorkerLoad(blocks_total=2000, **load)
        rig.router.apply_load(WorkerId("w1"), told, rig.now)
        return soon(rig.route(long), 0.1)

    assert route()
    assert not route(blocks_used=1500), "its memory is in use"
    rig.begin(long)
    assert not route(), "a long prefill is ahead of it"
