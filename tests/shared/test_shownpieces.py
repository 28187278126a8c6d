"""Tokens that processes show each other: what is found is right, or nothing is found."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import shownpieces
from shared.shownpieces import LEAST_AREA, ShownPieces, make_area_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such memory")
AREAS = 3
SECRET = b"s" * 32


@pytest.fixture
def views() -> Iterator[list[ShownPieces]]:
    fd = make_area_file(AREAS, LEAST_AREA)
    yield [ShownPieces(fd, number, AREAS, SECRET) for number in range(AREAS)]
    os.close(fd)


def test_what_one_process_encoded_all_find(views: list[ShownPieces]) -> None:
    name = views[0].name("tok", "some text")
    assert name == views[2].name("tok", "some text")
    assert views[1].find(name) is None
    views[0].add(name, b"\1\0\0\0\2\0\0\0")
    assert [view.find(name) for view in views] == [b"\1\0\0\0\2\0\0\0"] * AREAS
    others = [("kot", "some text"), ("tok", "some texts"), ("toks", "ome text")]
    assert all(views[0].find(views[0].name(*other)) is None for other in others)


def test_a_name_needs_the_secret(views: list[ShownPieces]) -> None:
    fd = make_area_file(AREAS, LEAST_AREA)
    other = ShownPieces(fd, 0, AREAS, b"another secret")
    os.close(fd)
    assert other.name("tok", "text") != views[0].name("tok", "text")


def test_a_record_that_was_changed_is_none(views: list[ShownPieces]) -> None:
    name, tokens = views[0].name("tok", "text"), bytes(range(64))
    views[0].add(name, tokens)
    start = shownpieces._SLOT_BYTES
    for at in range(start, start + shownpieces._HEAD.size + len(tokens)):
        kept = views[0]._bytes[at]
        views[0]._bytes[at] = kept ^ 0x55
        assert views[1].find(name) is None
        views[0]._bytes[at] = kept
    assert views[1].find(name) == tokens
    views[0]._slots[0][shownpieces._slot(name)] = LEAST_AREA - 3
    assert views[1].find(name) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_found_is_what_was_added_and_the_newest_stay(seed: int) -> None:
    rng = random.Random(seed)
    fd = make_area_file(AREAS, LEAST_AREA)
    views = [ShownPieces(fd, number, AREAS, SECRET) for number in range(AREAS)]
    os.close(fd)
    added: dict[bytes, bytes] = {}
    for step in range(200):
        view = rng.choice(views)
        name = view.name("tok", str(rng.randrange(120)))
        tokens = added.setdefault(name, rng.randbytes(rng.randrange(2000)))
        view.add(name, tokens)
        assert rng.choice(views).find(name) == tokens, step
        for known in rng.sample(list(added), min(5, len(added))):
            assert rng.choice(views).find(known) in (added[known], None)


def test_what_is_too_large_is_not_shown(views: list[ShownPieces]) -> None:
    name = views[0].name("tok", "text")
    views[0].add(name, bytes(LEAST_AREA // 4))
    assert views[0].find(name) is None
