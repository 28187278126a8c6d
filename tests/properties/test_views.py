"""What a view of a worker says is what its bookings, reports and pool say, counted anew."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from policykit import view

from gateway.booking import Booking
from gateway.decision import Booked
from gateway.member import STALE_LOAD_S, Member
from gateway.routing.base import Candidate, Query, Scored, Trust, WorkerState, WorkerView
from gateway.routing.pressure import Offered
from gateway.routing.ties import TieBreak, in_order
from gateway.views import PoolFacts, look
from shared.load import WorkerInfo, WorkerLoad
from shared.types import Epoch, RequestId, WorkerId

POOL = PoolFacts(0.011, 0.22, 7, 3.3, 44.0, 5e-5)
"""Different in each field, so that none can be taken for another."""


class Life:
    """One worker, and what happened to it written down."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now = rng, 100.0
        info = WorkerInfo(
            id=WorkerId("w"), epoch=Epoch(1), url="http://w", models=("m",), block_size=32,
            blocks_total=1000,
        )  # fmt: skip
        self.member = Member(info)
        self.pending: list[Booking] = []
        self.answering: list[Booking] = []
        self.told: tuple[float, WorkerLoad] | None = None

    def step(self) -> None:
        """Something happens."""
        self.now += self.rng.choice((0.0, 0.01, 1.0, 4.0))
        what = self.rng.randrange(5)
        if what <= 1:
            seconds, tokens = self.rng.random(), self.rng.randrange(1, 999)
            booking = Booking(seconds, tokens, self.now, 0.0, 60.0)
            self.member.book(booking)
            self.pending.append(booking)
        elif what == 2 and self.pending:
            booking = self.pending.pop(self.rng.randrange(len(self.pending)))
            self.member.start_decoding(booking, self.now)
            self.answering.append(booking)
        elif what == 3 and (live := self.pending + self.answering):
            booking = self.rng.choice(live)
            group = self.pending if booking in self.pending else self.answering
            group.remove(booking)
            assert self.member.release(booking, self.now, failed=False)
            assert not self.member.release(booking, self.now, failed=False)
        elif what == 4:
            self.told = self.now, WorkerLoad(running=2, waiting=1, blocks_used=90)
            self.member.report(self.told[1], self.now, 1e-4)

    def held(self) -> int:
        """KV tokens, summed up anew."""
        live = self.pending + self.answering
        if self.told is None or self.now - self.told[0] > STALE_LOAD_S:
            return sum(booking.kv_tokens for booking in live)
        since = [booking.kv_tokens for booking in live if booking.begun > self.told[0]]
        return self.told[1].blocks_used * 32 + sum(since)

    def look(self, peers: Booked | None = None) -> WorkerView:
        """Its view."""
        offered = Offered(0.1, 0.2, 0.3)
        return look(
            self.member, Trust.LEARNED, self.now, POOL, state=self.member.state(self.now),
            s_per_token=6e-4, offered=offered, peers=peers,
        )  # fmt: skip


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 40))
def test_sums_that_are_kept_are_those_of_the_bookings(seed: int, steps: int) -> None:
    life = Life(Random(seed))
    for _ in range(steps):
        life.step()
        life.look()  # an older view changes nothing
    view, member = life.look(), life.member
    assert view.booked_decode_tokens == life.held()
    assert (view.inflight, view.decoding) == (
        len(life.pending) + len(life.answering),
        len(life.answering),
    )
    whole = sum(booking.prefill_s for booking in life.pending)
    head = life.pending[0].prefill_s if life.pending else 0.0
    assert whole - head - 1e-9 <= member.prefill_s(life.now) <= whole + 1e-9
    assert member.booked(life.now).decode_tokens == member.kv_tokens


def test_each_fact_is_in_its_field() -> None:
    life = Life(Random(1))
    member = life.member
    booking = Booking(2.5, 640, life.now, 0.0, 60.0)
    member.book(booking)
    member.book(other := Booking(9.0, 320, life.now, 0.0, 60.0))
    member.start_decoding(other, life.now)
    member.breaker.fail(life.now, lost_s=0.7, probe=False, may_eject=False)
    load = WorkerLoad(
        running=4, waiting=1, blocks_total=500, blocks_used=30, decode_tokens_per_s=20.0,
        host_tokens_per_s=1e4,
    )  # fmt: skip
    life.now += 1.0
    member.report(load, life.now, 1e-4)
    life.now += 0.25
    member.joined, member.newcomer = life.now, True
    assert life.look(Booked(1.5, 77, 9)) == WorkerView(
        id=WorkerId("w"),
        state=WorkerState.READY,
        trust=Trust.LEARNED,
        block_size=32,
        inflight=2,
        booked_prefill_s=2.5 - 1.25 + 1.5,
        booked_decode_tokens=30 * 32,
        prefill_s_per_token=6e-4 / 0.5,
        overhead_s=POOL.overhead_s,
        failure_rate=member.breaker.failure_rate(life.now),
        failure_s=0.7,
        host_s_per_token=1e-4,
        kv_tokens_total=500 * 32,
        load=load,
        load_age_s=0.25,
        foreign=9,
        tpot_s=0.05,
        release_tokens_per_s=30 * 32 / (0.05 * POOL.usual_output),
        pool_busy=POOL.busy,
        fresh=True,
        decoding=1,
        at_once=POOL.at_once,
        service_s=POOL.service_s,
        offered=Offered(0.1, 0.2, 0.3),
    )


costs = st.lists(
    st.integers(0, 30).map(lambda n: n * 4e-5) | st.floats(0, 2) | st.just(float("inf")), max_size=6
)


@given(costs=costs, request=st.text("abc", min_size=1, max_size=5))
def test_the_order_is_that_of_rounded_costs(costs: list[float], request: str) -> None:
    """Rounding is left out where it cannot matter."""
    query = Query(RequestId(request), "m", 100, 0, 0.0)
    items = [Scored(Candidate(view(f"w{n}"), 0), cost) for n, cost in enumerate(costs)]
    tie = TieBreak(query)
    expected = sorted(items, key=lambda item: (round(item.cost, 4), tie(item.candidate.worker)))
    assert in_order(query, items) == expected
