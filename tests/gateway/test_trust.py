"""How far each worker's index is believed: what lowers it, what raises it, and that it is told."""

from __future__ import annotations

from random import Random

import pytest
from routerkit import Rig, ok

from gateway.decision import Route
from gateway.hindsight import GRACE_S
from gateway.parity import Parity, Verdict
from gateway.routing.base import Trust
from gateway.trust import TrustBook, TrustChange, mistrust
from gateway.trustwatch import (
    ENOUGH,
    FIRST_REST_S,
    MUTE_AFTER,
    Compared,
)
from shared.blocks import pack_keys
from shared.events import Snapshot, removed
from shared.types import BlockKey, WorkerId

W = WorkerId("w1")


class Watched(Rig):
    """A rig of one worker that keeps the changes of trust."""

    def __init__(self, *, events: bool = True) -> None:
        self.changes: list[TrustChange] = []
        self.events = events
        super().__init__(workers=1, events=events, on_trust=self.changes.append)

    @property
    def trust(self) -> tuple[Trust, str]:
        status = self.router.workers(self.now)[0]
        return status.trust, status.trust_reason

    def told(self) -> list[tuple[Trust, Trust]]:
        return [(change.before, change.after) for change in self.changes]

    def ask(self, keys: list[BlockKey], cached: int | None) -> Route:
        """One whole request; what it promised is forgotten afterwards, and what it says of the
        worker is settled."""
        route = self.route(keys)
        self.serve(keys, cached)
        self.settle()
        return route

    def settle(self) -> None:
        """What was predicted is compared with what was delivered."""
        self.now += GRACE_S
        self.tick()

    def tick(self) -> None:
        """The follower of the feed says what it always says."""
        if self.events:
            self.router.set_trust(W, Trust.EXACT, "events flow", self.now)

    def rest(self, seconds: float = FIRST_REST_S) -> None:
        self.now += seconds


def family(rig: Rig, shared: list[BlockKey]) -> list[BlockKey]:
    return shared + rig.prompt(2)


def test_an_engine_that_makes_other_tokens_than_we_do_is_learned_instead() -> None:
    """Its events name keys that no prompt of ours has: all that is delivered comes unforeseen."""
    rig = Watched()
    shared = rig.prompt(20)
    rig.ask(family(rig, shared), 0)
    for _ in range(ENOUGH):
        assert rig.trust[0] is Trust.EXACT
        rig.ask(family(rig, shared), 320)
    trust, reason = rig.trust
    assert (trust, reason) == (Trust.LEARNED, "100% of its tokens were predicted wrongly")
    assert rig.told()[-1] == (Trust.EXACT, Trust.LEARNED)
    rig.ask(family(rig, shared), 320)
    for _ in range(3 * ENOUGH):
        assert rig.ask(family(rig, shared), 320).matched_tokens == 320, "learned from its answers"
    assert rig.trust[0] is Trust.LEARNED, "what its events say would be as wrong as before"
    status = rig.router.workers(rig.now)[0]
    assert status.prediction_error == 0.0
    assert status.learned_tokens > 0
    assert rig.told()[-1] == (Trust.EXACT, Trust.LEARNED)


def test_exact_returns_when_the_events_alone_would_have_been_right() -> None:
    rig = Watched()
    shared = rig.prompt(20)
    rig.ask(family(rig, shared), 0)
    for _ in range(ENOUGH):
        rig.ask(family(rig, shared), 320)
    assert rig.trust[0] is Trust.LEARNED
    rig.warm("w1", shared)  # its events make sense from now on
    rig.rest()
    for _ in range(ENOUGH):
        assert rig.trust[0] is Trust.LEARNED
        rig.ask(family(rig, shared), 320)
    assert rig.trust == (Trust.EXACT, "events flow")
    assert rig.route(family(rig, shared)).matched_tokens == 320
    rig.evict("w1", shared)
    assert rig.route(family(rig, shared)).matched_tokens == 0, "nothing that was learned is left"


def test_events_that_are_lost_without_a_gap_are_noticed_by_what_is_delivered() -> None:
    rig = Watched()
    prompts = [rig.prompt(20) for _ in range(40)]
    for prompt in prompts:
        rig.warm("w1", prompt)
    for prompt in prompts[:ENOUGH]:
        assert rig.ask(prompt, 320).matched_tokens == 320
    for prompt in prompts[ENOUGH:]:
        rig.ask(prompt, 0)  # it evicted them, and never said so
        if rig.trust[0] is Trust.LEARNED:
            break
    assert rig.trust[0] is Trust.LEARNED
    assert rig.route(prompts[-1]).matched_tokens == 0


def test_a_gap_lowers_at_once_and_the_snapshot_raises() -> None:
    rig = Watched()
    rig.seqs["w1"] += 1
    assert rig.feed("w1", removed([1])) == "gap"
    assert rig.trust == (Trust.LEARNED, "gap in its events")
    assert rig.feed("w1", Snapshot(b"")) == "applied"
    rig.router.set_trust(W, Trust.EXACT, "events flow", rig.now)
    assert rig.told()[-2:] == [(Trust.EXACT, Trust.LEARNED), (Trust.LEARNED, Trust.EXACT)]


@pytest.mark.parametrize("late_s", [0.0, GRACE_S / 2])
def test_evictions_under_pressure_that_the_events_tell_are_no_error(late_s: float) -> None:
    """Each prompt is evicted between its decision and its turn; its events come after the answer,
    or between. Learned would be no better."""
    rig = Watched()
    prompts = [rig.prompt(20) for _ in range(5)]
    for n in range(8 * ENOUGH):
        keys = prompts[n % 5]
        rig.warm("w1", keys)
        lease = rig.begin(keys)
        lease.first_token(rig.now)
        if not late_s:
            rig.evict("w1", keys)
        lease.finish(ok(321, 0), rig.now)
        rig.now += late_s
        if late_s:
            rig.evict("w1", keys)
        rig.warm("w1", keys)  # the request itself has computed it anew
        rig.evict("w1", keys)
        rig.settle()
        assert rig.trust == (Trust.EXACT, "events flow")


def test_what_others_stored_meanwhile_is_no_error() -> None:
    """Another gateway's request had stored it before this one's turn came."""
    rig = Watched()
    for _ in range(3 * ENOUGH):
        keys = rig.prompt(20)
        lease = rig.begin(keys)
        rig.warm("w1", keys)
        lease.finish(ok(321, 304), rig.now)
        rig.settle()
    assert rig.trust == (Trust.EXACT, "events flow")


def test_evictions_of_other_blocks_excuse_nothing() -> None:
    rig = Watched()
    for _ in range(2 * ENOUGH):
        keys, other = rig.prompt(20), rig.prompt(20)
        rig.warm("w1", keys)
        rig.warm("w1", other)
        lease = rig.begin(keys)
        rig.evict("w1", other + keys[10:])
        lease.finish(ok(321, 0), rig.now)
        rig.settle()
        if rig.trust[0] is not Trust.EXACT:
            break
    assert rig.trust[0] is Trust.LEARNED


@pytest.mark.parametrize("how", ["snapshot", "gap and checkpoint", "under way"])
def test_what_was_predicted_before_contents_were_told_anew_counts_nothing(how: str) -> None:
    """A hole that is noticed late: until then all is predicted wrongly."""
    rig = Watched()
    prompts = [rig.prompt(20) for _ in range(2 * ENOUGH)]
    for prompt in prompts:
        rig.warm("w1", prompt)
    leases = [rig.begin(prompt) for prompt in prompts]
    if how != "under way":
        for lease in leases:
            lease.finish(ok(321, 0), rig.now)
        rig.now += GRACE_S / 2
    if how != "snapshot":
        rig.seqs["w1"] += 1
        assert rig.feed("w1", removed([1])) == "gap"
    assert rig.feed("w1", Snapshot(b"")) == "applied"
    rig.tick()
    if how == "under way":
        for lease in leases:
            lease.finish(ok(321, 0), rig.now)
    rig.settle()
    assert rig.trust == (Trust.EXACT, "events flow")
    rig.ask(rig.prompt(20), 0)
    assert rig.trust == (Trust.EXACT, "events flow")


def test_trust_that_was_lowered_needs_no_rest_once_contents_were_told_anew() -> None:
    """What had been wrong is gone; that it is right now has to be seen all the same."""
    rig = Watched()
    shared = rig.prompt(20)
    rig.ask(family(rig, shared), 0)
    for _ in range(ENOUGH):
        rig.ask(family(rig, shared), 320)
    assert rig.trust[0] is Trust.LEARNED
    rig.seqs["w1"] += 1
    rig.feed("w1", removed([1]))
    rig.feed("w1", Snapshot(pack_keys(shared)))
    rig.tick()
    assert rig.trust[0] is Trust.LEARNED
    for _ in range(ENOUGH):
        rig.serve(family(rig, shared), 320)
    assert rig.trust == (Trust.EXACT, "events flow")


def test_few_or_small_differences_lower_nothing() -> None:
    rig, rng = Watched(), Random(1)
    shared = rig.prompt(20)
    rig.warm("w1", shared)
    for n in range(200):
        # An eviction while it waited now and then, and less than a block always.
        rig.ask(family(rig, shared), 0 if n % 8 == 0 else 320 - rng.randrange(16))
    assert rig.trust[0] is Trust.EXACT


def test_siblings_under_way_are_no_error() -> None:
    rig = Watched()
    for n in range(2 * ENOUGH):
        shared = rig.prompt(20)
        leader, sibling = rig.begin(family(rig, shared)), rig.begin(family(rig, shared))
        leader.finish(ok(353, 0), rig.now)
        sibling.finish(ok(353, 320 * (n % 2)), rig.now)
    assert rig.trust[0] is Trust.EXACT


def test_trust_on_the_edge_rests_longer_each_time() -> None:
    changes: list[TrustChange] = []
    book = TrustBook(changes.append)
    book.join(W, cacheless=False, reason="new")
    book.told(W, Trust.EXACT, "events flow")
    now, lowered_at, rests = 0.0, 0.0, []
    for _ in range(4000):
        now += 0.5
        exact = book.of(W)[0] is Trust.EXACT
        seen = Compared(320 if exact else 0, 320 if exact else 0, None if exact else 320, 0, 16)
        if not exact:
            seen = Compared(0, 0, 320, 320, 16)
        before = len(changes)
        book.compare(W, seen, now)
        if len(changes) > before:
            if changes[-1].after is Trust.EXACT:
                rests.append(now - lowered_at)
            else:
                lowered_at = now
    assert rests[0] <= FIRST_REST_S + 1
    assert rests == sorted(rests)
    assert rests[3] >= 4 * rests[0]
    assert len(changes) < 20


def test_an_engine_that_never_reports_is_blind_until_it_does() -> None:
    rig = Watched(events=False)
    shared = rig.prompt(20)
    rig.ask(family(rig, shared), None)
    for _ in range(MUTE_AFTER):
        assert rig.trust == (Trust.LEARNED, "no event feed")
        rig.ask(family(rig, shared), None)
    assert rig.trust == (Trust.BLIND, "it never reports cached_tokens")
    assert rig.route(family(rig, shared)).matched_tokens == 0
    rig.ask(family(rig, shared), 320)
    assert rig.trust[0] is Trust.LEARNED
    assert rig.route(family(rig, shared)).matched_tokens == 320


def test_absent_counts_as_nothing_delivered_once_an_engine_has_reported() -> None:
    """Some leave the figure out where it is 0."""
    rig = Watched(events=False)
    prompts = [rig.prompt(20) for _ in range(6)]
    for prompt in prompts:
        rig.ask(prompt, None)
    rig.ask(prompts[-1], 320)
    for prompt in prompts[2:5]:
        rig.ask(prompt, None)
    assert rig.route(prompts[0]).matched_tokens == 0, "three empty answers: it has lost all"


def test_silent_about_its_cache_but_with_events_it_stays_exact_and_says_so() -> None:
    rig = Watched()
    shared = rig.prompt(20)
    rig.warm("w1", shared)
    for _ in range(MUTE_AFTER):
        rig.ask(family(rig, shared), None)
    assert rig.trust[0] is Trust.EXACT
    assert "never reports cached_tokens" in rig.trust[1]


@pytest.mark.parametrize("returns", [True, False])
def test_an_engine_that_reuses_nothing_is_blind_until_it_does(returns: bool) -> None:
    """Its cache is off, or much smaller than any distance between two uses."""
    rig = Watched(events=False)
    prompts = [rig.prompt(20) for _ in range(4)]
    for prompt in prompts:
        rig.ask(prompt, 0)
    for n in range(60):
        rig.ask(prompts[n % 4], 0)
    trust, reason = rig.trust
    assert (trust, reason) == (Trust.BLIND, "it delivered 0% of what it should hold")
    rig.rest()
    for n in range(3 * ENOUGH):
        rig.ask(prompts[n % 4], 320 * returns)
    assert rig.trust[0] is (Trust.LEARNED if returns else Trust.BLIND)


def test_blind_by_text_returns_as_well() -> None:
    rig = Watched(events=False)
    prompts = [rig.prompt(20) for _ in range(4)]

    def ask(keys: list[BlockKey], cached: int) -> None:
        route = rig.router.decide(rig.query(keys, tokens=0), rig.now)
        assert isinstance(route, Route)
        rig.router.begin(route, rig.now, attempt=1).finish(ok(328, cached), rig.now)
        rig.now += 2.0

    for n in range(64):
        ask(prompts[n % 4], 0)
    assert rig.trust[0] is Trust.BLIND
    for n in range(3 * ENOUGH):
        ask(prompts[n % 4], 320)
    assert rig.trust[0] is Trust.LEARNED


def test_a_cache_that_is_off_is_blind_whatever_its_feed_says() -> None:
    rig = Watched()
    rig.join("w1", epoch=2, prefix_cache=False)
    rig.router.set_trust(W, Trust.EXACT, "events flow", rig.now)
    assert rig.trust == (Trust.BLIND, "no prefix cache")


def test_limits_hold_each_for_itself_and_end_with_the_incarnation() -> None:
    rig = Watched()
    rig.router.note_parity(W, Parity(Verdict.DIFFERENT, "a space more"), rig.now)
    assert rig.trust == (Trust.LEARNED, "its tokens differ: a space more")
    rig.router.limit_trust(W, "operator", Trust.BLIND, "switched off")
    assert rig.trust == (Trust.BLIND, "switched off")
    rig.router.limit_trust(W, "operator", None, "")
    assert rig.trust[0] is Trust.LEARNED
    rig.router.note_parity(W, Parity(Verdict.EQUAL), rig.now)
    assert rig.trust == (Trust.EXACT, "events flow")
    rig.router.limit_trust(W, "operator", Trust.BLIND, "switched off")
    rig.join("w1", epoch=2)
    assert rig.trust == (Trust.LEARNED, "no cache events yet")
    assert [change.worker for change in rig.changes] == ["w1"] * len(rig.changes)
    assert all(change.reason and change.before is not change.after for change in rig.changes)


def test_prompts_known_as_text_are_learned_beside_the_events() -> None:
    """Without a tokenizer keys are made of text, of which events never speak."""
    rig = Watched()
    tokens, text = rig.prompt(20), rig.prompt(20)
    rig.warm("w1", tokens)

    def ask(keys: list[BlockKey], cached: int, *, known: bool) -> Route:
        query = rig.query(keys, tokens=len(keys) * 16 + 1 if known else 0)
        route = rig.router.decide(query, rig.now)
        assert isinstance(route, Route)
        rig.router.begin(route, rig.now, attempt=1).finish(ok(len(keys) * 16 + 8, cached), rig.now)
        return route

    assert ask(text, 0, known=False).chosen.candidate.worker.trust is Trust.LEARNED
    for _ in range(3 * ENOUGH):
        assert ask(text, 320, known=False).matched_tokens == 320
        exact = ask(tokens, 320, known=True)
        assert (exact.matched_tokens, exact.chosen.candidate.worker.trust) == (320, Trust.EXACT)
    assert rig.feed("w1", Snapshot(b"")) == "applied"
    assert ask(text, 320, known=False).matched_tokens == 320, "a snapshot is about tokens"
    assert ask(tokens, 0, known=True).matched_tokens == 0
    rig.join("w1", epoch=2)
    assert rig.route(text).matched_tokens == 0


def test_readiness_names_each_reason_once() -> None:
    rig = Rig(workers=6)
    assert mistrust(rig.router.workers(rig.now)) == []
    for name in rig.names[:5]:
        rig.seqs[name] += 1
        rig.feed(name, removed([1]))
    rig.router.limit_trust(WorkerId("w6"), "operator", Trust.BLIND, "switched off")
    rig.join("w7", event_feed=False)
    assert mistrust(rig.router.workers(rig.now)) == [
        "prefix knowledge is learned (gap in its events): w1, w2, w3 and 2 more",
        "prefix knowledge is blind (switched off): w6",
    ]
