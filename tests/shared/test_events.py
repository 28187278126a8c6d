"""Cache events survive their encoding."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import pack_keys
from shared.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    Snapshot,
    decode_batch,
    encode_batch,
    removed,
    stored,
)
from shared.types import Epoch, Tier, WorkerId

KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=20)
TIER = st.sampled_from(Tier)
EVENT = (
    st.builds(stored, KEYS, st.none() | st.integers(0, 2**64 - 1), TIER)
    | st.builds(removed, KEYS, TIER)
    | st.just(CacheCleared())
    | st.builds(Snapshot, KEYS.map(pack_keys), TIER)
)


def batch(*events: BlocksStored | BlocksRemoved | CacheCleared | Snapshot) -> EventBatch:
    return EventBatch(WorkerId("w:1"), Epoch(2**62), "worker", 7, 1.5, 2, events)


@given(st.lists(EVENT, max_size=5))
def test_a_batch_is_what_was_sent(events: list[BlocksStored]) -> None:
    sent = batch(*events)
    assert decode_batch(encode_batch(sent)) == sent


@given(KEYS)
def test_keys_of_an_event(keys: list[int]) -> None:
    for event in (stored(keys, None), removed(keys), Snapshot(pack_keys(keys))):
        assert list(event.keys) == keys


def test_a_key_costs_about_eight_bytes() -> None:
    assert len(encode_batch(batch(stored(list(range(1000)), 1)))) < 8_100


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", encode_batch(batch())[:-1], b"\xff" * 40])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(data)
