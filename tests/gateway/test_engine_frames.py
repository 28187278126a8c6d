"""Event frames in every form that engines send, and bytes that are none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engines.base import Cleared, MalformedFrame, Removed, Stored
from gateway.engines.continuity import Continuity, Replayed, Verdict
from gateway.engines.frames import SGLANG, VLLM, Dialect, decode
from shared.types import Tier

pack = msgspec.msgpack.encode


def only(batch: object, dialect: Dialect = VLLM) -> object:
    frame = decode(pack(batch), dialect)
    assert not frame.malformed
    assert len(frame.events) == 1
    return frame.events[0]


ARRAY = ["BlockStored", [7, 8], None, list(range(32)), 16, None, "GPU", None]
MAP = {
    "type": "BlockStored",
    "block_hashes": [7, 8],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


@pytest.mark.parametrize("dialect", [VLLM, SGLANG])
@pytest.mark.parametrize(
    "batch",
    [
        [1.5, [ARRAY]],
        [1.5, [ARRAY], 0],
        [1.5, [ARRAY], None, "a field of the future", {}],
        [1.5, [[*ARRAY, None, None, None, None, "later", 9]]],
        [1.5, [ARRAY[:6]]],
        [1.5, [MAP], 0],
        [1.5, [{**MAP, "later": 9, "session_id": "s"}]],
        {"ts": 1.5, "events": [MAP]},
    ],
)
def test_every_form_of_a_stored_event_means_the_same(batch: object, dialect: Dialect) -> None:
    event = only(batch, dialect)
    assert isinstance(event, Stored)
    assert event.ids == (7, 8)
    assert (event.parent, list(event.tokens), event.block_size) == (None, list(range(32)), 16)
    assert (event.tier, event.adapter, event.salt, event.extras) == (Tier.GPU, "", "", ())


def test_hashes_are_ints_of_either_sign_or_digests_of_which_the_end_counts() -> None:
    digest = bytes(range(32))
    event = only([0.0, [["BlockRemoved", [-1, digest, int.from_bytes(digest[-8:], "big")], "CPU"]]])
    assert isinstance(event, Removed)
    assert event.ids[0] == (1 << 64) - 1
    assert event.ids[1] == event.ids[2]
    assert event.tier is Tier.HOST


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("CPU_PINNED", Tier.HOST),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("of the future", Tier.DISK),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    event = only([0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": medium}]])
    assert isinstance(event, Removed)
    assert event.tier is tier


@pytest.mark.parametrize(
    ("extra_keys", "adapter", "salt", "plain"),
    [
        ([["pepper"], None], "", "pepper", True),
        ([["lora-a", "pepper"], ["lora-a"]], "lora-a", "pepper", True),
        ([["lora-a", ["digest", 0], "pepper"], ["lora-a"]], "lora-a", "pepper", False),
        (
            [[["lora", "lora-a"], ["cache_salt", "pepper"]], [["lora", "lora-a"]]],
            "lora-a",
            "pepper",
            True,
        ),
        ([[["digest", 3]], None], "", "", False),
        ([["dynamo-cache-salt:pepper"], None], "", "pepper", True),
        ([None, None], "", "", True),
    ],
)
def test_extra_keys_hold_adapter_salt_and_other_inputs(
    extra_keys: list[object], adapter: str, salt: str, plain: bool
) -> None:
    event = only([0, [{**MAP, "lora_name": adapter or None, "extra_keys": extra_keys}]])
    assert isinstance(event, Stored)
    assert (event.adapter, event.salt, event.extras == ()) == (adapter, salt, plain)


def test_an_adapter_is_named_by_its_name_or_by_the_first_extra_key_or_not_at_all() -> None:
    named = only([0, [{**MAP, "lora_id": 1, "lora_name": "a"}]])
    by_key = only([0, [{**MAP, "lora_id": 1, "extra_keys": [["a"], ["a"]]}]])
    unnamed = only([0, [[*ARRAY[:5], 1, "GPU"]]])
    assert [e.adapter for e in (named, by_key, unnamed)] == ["a", "a", None]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "event",
    [
        [*ARRAY[:7], {"cache_salt": "pepper", "session_id": "s"}],
        [*ARRAY[:7], None, None, None, None, None, None, None, {"cache_salt": "pepper"}],
        [*ARRAY[:7], None, [["dynamo-cache-salt:pepper"], None], *[None] * 5, {}],
        {**MAP, "cache_salt": "pepper", "namespaced_block_hashes": [1, 2]},
    ],
)
def test_the_salts_of_sglang(event: object) -> None:
    stored = only([0, [event]], SGLANG)
    assert isinstance(stored, Stored)
    assert (stored.salt, stored.adapter, stored.extras) == ("pepper", "", ())


def test_bigrams_stand_for_their_first_tokens() -> None:
    pairs = [[i, i + 1] for i in range(32)]
    event = only([0, [{**MAP, "token_ids": pairs}]], SGLANG)
    assert isinstance(event, Stored)
    assert list(event.tokens) == list(range(32))


def test_a_block_is_as_large_as_its_tokens_say() -> None:
    event = only([0, [{**MAP, "token_ids": list(range(64)), "block_size": 16}]])
    assert isinstance(event, Stored)
    assert event.block_size == 32


BAD = [
    ["BlockStored", [1], None, [1] * 15, 16.0],
    ["BlockStored", [1, 2], None, [1] * 15, 16],
    ["BlockStored", [1], None, [-1] * 16, 16],
    ["BlockStored", [1], None, [1 << 32] * 16, 16],
    ["BlockStored", [1.5], None, [1] * 16, 16],
    ["BlockStored", "x", None, [1] * 16, 16],
    ["BlockStored", [], None, [], 16],
    ["BlockStored", [1], {}, [1] * 16, 16],
    ["BlockStored", [1], None, ["a"] * 16, 16],
    ["BlockStored", [1], None, [1] * 16, 16, None, 5],
    ["BlockRemoved", None],
    ["BlockRemoved"],
    [7],
    [],
    {"block_hashes": [1]},
    "text",
    None,
]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_an_event_that_cannot_be_read_is_counted_and_the_rest_goes_on(bad: object) -> None:
    frame = decode(pack([0.0, [bad, ["AllBlocksCleared"], ["AFutureEvent", 1]]]), VLLM)
    assert (frame.malformed, frame.unknown) == (1, 1)
    assert frame.events == (Cleared(),)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack(7),
        pack([]),
        pack([1.0]),
        pack(["x", []]),
        pack([1.0, {}]),
        pack({"events": []}),
        pack([1.0, [["AllBlocksCleared"]]])[:-3],
        b"\x91" * 5000,
        pack([0.0, [0] * 70000]),
    ],
    ids=lambda p: repr(p[:12]),
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    for dialect in (VLLM, SGLANG):
        with pytest.raises(MalformedFrame):
            decode(payload, dialect)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_any_bytes_are_a_frame_or_refused(noise: bytes, at: int, patch: bytes) -> None:
    good = pack([1.5, [ARRAY, MAP, ["BlockRemoved", [7], "GPU"], ["AllBlocksCleared"]], 0])
    at %= len(good)
    for payload in (noise, good[:at], good[:at] + patch + good[at + len(patch) :]):
        for dialect in (VLLM, SGLANG):
            try:
                frame = decode(payload, dialect)
            except MalformedFrame:
                continue
            for event in frame.events:
                if isinstance(event, Stored):
                    assert len(event.tokens) in (0, event.block_size * len(event.ids))
                    assert all(0 <= one < 1 << 64 for one in event.ids)


def test_sequence_numbers_are_next_missing_old_or_another_incarnation() -> None:
    stream = Continuity()
    assert stream.judge(0) is Verdict.NEXT
    stream.take(0, b"a")
    assert stream.judge(3) is Verdict.GAP
    for seq in (1, 2, 3):
        stream.take(seq, b"x")
    assert stream.judge(4) is Verdict.NEXT
    stream.take(4, b"b")
    assert stream.judge(4) is Verdict.RESTARTED
    ahead = Continuity()
    ahead.judge(0)
    ahead.take(0, b"")
    ahead.take(1, b"")  # by replay, before the live stream has brought it
    assert ahead.judge(1) is Verdict.OLD


def test_a_replay_shows_by_its_first_batch_whose_it_is() -> None:
    stream = Continuity()
    assert stream.begin_replay(0, b"a") is Replayed.SAME
    assert stream.begin_replay(5, b"a") is Replayed.TOO_LATE
    stream.take(7, b"seven")
    assert stream.ask_from() == 7
    assert stream.begin_replay(7, b"seven") is Replayed.SAME
    assert stream.begin_replay(7, b"another seven") is Replayed.ANOTHER
    assert stream.begin_replay(2, b"seven") is Replayed.ANOTHER
    assert stream.begin_replay(8, b"eight") is Replayed.TOO_LATE
