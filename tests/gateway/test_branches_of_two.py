"""Two gateways before the same workers: the branches that each counts are those of the prompts that
it has met, not of what the other one had computed."""

from __future__ import annotations

from random import Random

import pytest
from routerkit import Rig, ok

from gateway.learned import Fact
from shared.blocks import GRANULE, pack_keys
from shared.events import stored
from shared.types import BlockKey, WorkerId


class Pair:
    """Two gateways; what one of them has computed the other learns by events, or by facts."""

    def __init__(self, workers: int, *, events: bool) -> None:
        self.rigs = [Rig(workers, events=events) for _ in range(2)]
        self.events = events
        self.rng = Random(7)
        self.held: dict[str, set[BlockKey]] = {}

    def keys(self, granules: int) -> list[BlockKey]:
        return [BlockKey(self.rng.getrandbits(64)) for _ in range(granules)]

    def ask(self, at: int, keys: list[BlockKey], *, answer: int = 2) -> list[BlockKey]:
        """One request by one gateway; the prompt and its answer, which is cached as well."""
        rig = self.rigs[at]
        lease = rig.begin(keys)
        lease.first_token(rig.now)
        whole = [*keys, *self.keys(answer)]
        cached = sum(key in self.held.setdefault(lease.worker, set()) for key in keys)
        new = [key for key in whole if key not in self.held[lease.worker]]
        self.held[lease.worker] |= set(new)
        if self.events:
            parent = whole[-len(new) - 1] if len(new) < len(whole) else None
            for one in self.rigs:
                one.feed(lease.worker, stored([int(key) for key in new], parent))
        lease.finish(ok(len(keys) * GRANULE + 1, cached * GRANULE), rig.now)
        if not self.events:
            fact = Fact(
                lease.worker,
                pack_keys(keys),
                prompt_tokens=len(keys) * GRANULE + 1,
                output_tokens=4,
            )
            self.rigs[1 - at].router.apply_learned(fact)
        for one in self.rigs:
            one.now += 2.0
        return whole


def popularity(rig: Rig, keys: list[BlockKey]) -> tuple[float, float]:
    """Branches below the beginning of a prompt, and its tokens whose recomputation pays."""
    rig.join("newcomer")  # which holds nothing
    candidates = [one.candidate for one in rig.route(keys).order]
    rig.router.leave(WorkerId("newcomer"), rig.now, "the question was answered")
    [found] = [one for one in candidates if one.worker.id == "newcomer"]
    return found.branches, found.shared_tokens


@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("order", ["01", "0011", "10010110", "0001000"])
def test_a_conversation_that_both_serve_makes_no_branch(events: bool, order: str) -> None:
    pair = Pair(2, events=events)
    talk = pair.keys(20)
    for at in map(int, order * 3):
        talk = [*pair.ask(at, talk), *pair.keys(3)]
        for rig in pair.rigs:
            assert popularity(rig, talk) == (1.0, 0.0)


@pytest.mark.parametrize("events", [True, False])
def test_what_is_shared_by_many_is_popular_at_both(events: bool) -> None:
    pair = Pair(2, events=events)
    system = pair.keys(20)
    talks = [[*system, *pair.keys(4)] for _ in range(8)]
    for turn in range(4):
        for number, talk in enumerate(talks):
            talks[number] = [*pair.ask((number + turn) % 2, talk), *pair.keys(2)]
    # All eight have been at each gateway; later turns count for nothing.
    expected = (pytest.approx(8.0), pytest.approx(20 * GRANULE * (1 - 1 / 64)))
    for rig in pair.rigs:
        for talk in ([*system, *pair.keys(4)], *talks):
            assert popularity(rig, talk) == expected


def test_a_burst_at_one_counts_at_once_beside_events_of_it() -> None:
    rig = Rig(2)
    system = rig.prompt(20)
    leases = []
    for number in range(1, 6):
        talk = [*system, *rig.prompt(4)]
        lease = rig.begin(talk)
        # Its events are there long before its answer ends.
        rig.feed(lease.worker, stored([int(key) for key in talk], None))
        leases.append(lease)
        assert popularity(rig, [*system, *rig.prompt(2)])[0] == pytest.approx(number)
    assert {lease.worker for lease in leases} <= {WorkerId("w1"), WorkerId("w2")}
