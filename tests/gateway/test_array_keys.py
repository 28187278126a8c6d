"""Keys of a long text are an array, those of a short one a list: nothing depends on which it is."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from routerkit import Rig, ok

from gateway.decision import Route
from gateway.learn import Served
from gateway.learned import Fact
from shared.blocks import extend_chain
from shared.textchain import PAGE_BYTES, TextChain
from shared.types import BlockKey, WorkerId

ROOT = b"r" * 16
Form = Callable[[Sequence[BlockKey]], Any]


def as_array(keys: Sequence[BlockKey]) -> Any:
    return array("Q", keys)


def test_long_texts_have_arrays() -> None:
    chain = TextChain()
    assert type(chain.keys(ROOT, b"x" * (PAGE_BYTES - 1))) is list
    keys = chain.keys(ROOT, b"x" * PAGE_BYTES)
    assert keys == array("Q", extend_chain(ROOT, b"x" * PAGE_BYTES)[0])


def told(form: Form, *, events: bool) -> list[Any]:
    """Decisions, records and contents of a history in which prompts share beginnings."""
    rig = Rig(3, events=events, index_max_blocks=900)
    stems = [rig.prompt(60) for _ in range(3)]
    seen: list[Any] = []
    for turn in range(60):
        stem = stems[turn % 3]
        keys = form([*stem[: 10 + turn], *rig.prompt(turn % 7 * 8)])
        query = rig.query(keys, tokens=0, plain_keys=form(stem[: turn % 5 * 4]))
        route = rig.router.decide(query, rig.now)
        assert isinstance(route, Route)
        lease = rig.router.begin(route, rig.now, attempt=1)
        sibling = rig.route(keys)
        lease.first_token(rig.now)
        cached = (0, 128, None, len(keys) * 16)[turn % 4]
        record = lease.finish(ok(len(keys) * 16 + 1, cached), rig.now + 0.1)
        rig.now += 1.0
        seen += [route.order, route.overlap, sibling.order, record, rig.index.match(keys)]
    rig.index.check()
    return seen


@pytest.mark.parametrize("events", [False, True])
def test_a_history_is_the_same_with_both(events: bool) -> None:
    lists, arrays = told(list, events=events), told(as_array, events=events)
    assert any(isinstance(part, dict) and part for part in lists)
    assert lists == arrays


def test_facts_for_other_gateways_are_the_same() -> None:
    keys = [BlockKey(key) for key in range(300)]
    served = [Served(form(keys), 4800, 5, 0, 0) for form in (list, as_array)]
    one, other = (Fact.of(WorkerId("w"), request) for request in served)
    assert one == other
