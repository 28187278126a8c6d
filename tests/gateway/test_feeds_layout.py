"""Commands and replies of the layout in Redis; slots; frames of a worker's own feed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot
from redis.exceptions import ResponseError

from gateway.decision import Booked
from gateway.feeds.bookings import decode_bookings, encode_bookings
from gateway.feeds.httpfeed import FeedBroken, FrameParser
from gateway.index import redis as layout
from shared.blocks import pack_keys
from shared.events import EventBatch, encode_batch, stored
from shared.load import WorkerInfo, WorkerLoad
from shared.rediskeys import CHUNKS, SCHEMA, RedisKeys
from shared.types import Tier

KEYS = RedisKeys("t")
HOST_REPLIES = [pack_keys([7]), *[b""] * (CHUNKS - 1)]
CHUNK_REPLIES = [pack_keys([chunk << 60 | 1]) for chunk in range(CHUNKS)]


def slots(command: layout.Command) -> set[int]:
    names = [part for part in command if isinstance(part, str) and part.startswith("hw:")]
    assert names
    return {key_slot(name.encode()) for name in names}


def test_no_command_crosses_a_slot() -> None:
    commands = [
        *layout.members_commands(KEYS),
        *layout.registration_commands(KEYS, ["a", "b"]),
        *layout.checkpoint_commands(KEYS, "a", 5),
        *layout.look_commands(KEYS, range(KEYS.shards))[0][1::2],
        *layout.poll_commands(KEYS, dict.fromkeys(range(KEYS.shards), b"1-0")),
        layout.forget_member_command(KEYS, "a"),
        layout.read_command(KEYS, {3: b"0-0"}, 10),
        ("MGET", KEYS.bookings("g1"), KEYS.bookings("g2"), KEYS.gateways()),
    ]
    assert all(len(slots(command)) == 1 for command in commands)
    workers = [f"10.0.0.{n}:8100" for n in range(200)]
    assert len({key_slot(KEYS.worker(w).encode()) for w in workers}) == KEYS.shards


def test_the_shard_of_a_stream_is_read_from_its_name() -> None:
    for keys in (KEYS, RedisKeys("a.b}c.7")):
        for shard in (0, 9, 15):
            assert keys.shard_in(keys.log(shard).encode()) == shard
            assert keys.shard_in(keys.learned(shard).encode()) == shard


def test_a_read_takes_a_bounded_number_of_entries() -> None:
    for shards in (1, 16, 1000):
        command = layout.read_command(KEYS, dict.fromkeys(range(shards), b"1-0"), 10)
        assert command[2] * shards <= max(layout.ENTRIES_PER_READ, shards)
        assert len(command) == 6 + 2 * shards


def registration(**changes: bytes) -> list[bytes]:
    fields = {
        b"info": msgspec.json.encode(WorkerInfo("a", 5, "http://a:1", ("m",))),
        b"load": msgspec.json.encode(WorkerLoad(running=3)),
        b"epoch": b"5",
        b"seq": b"9",
    }
    fields |= {name.encode(): value for name, value in changes.items()}
    return [part for pair in fields.items() for part in pair]


def test_a_registration_is_read() -> None:
    found = layout.parse_registration(registration())
    assert (found.info.id, found.epoch, found.seq, found.load.running) == ("a", 5, 9, 3)
    assert layout.parse_registration([]) is None
    assert layout.parse_registration(ResponseError("WRONGTYPE")) is None


@pytest.mark.parametrize(
    "changes", [{"info": b"{"}, {"load": b"[]"}, {"epoch": b"x"}, {"schema": b"x"}]
)
def test_an_unreadable_registration_is_told_apart_from_none(changes) -> None:
    with pytest.raises(msgspec.DecodeError):
        layout.parse_registration(registration(**changes))


def test_a_registration_of_a_newer_form_is_not_half_understood() -> None:
    for told in (b"0", b"1", str(SCHEMA).encode()):
        assert layout.parse_registration(registration(schema=told)) is not None
    with pytest.raises(msgspec.DecodeError, match="update this gateway"):
        layout.parse_registration(registration(schema=str(SCHEMA + 1).encode()))


def test_members_of_all_shards_are_read() -> None:
    replies = [[b"b", b"a"], [], ResponseError("WRONGTYPE"), [b"c"]]
    assert layout.parse_members(replies) == ["a", "b", "c"]


def test_a_checkpoint_is_read_whole() -> None:
    manifest = [b"5", b"12", b"0"]
    found = layout.parse_checkpoint([manifest, CHUNK_REPLIES + [None] * CHUNKS, manifest], 5)
    assert found.seq == 12
    batch = found.as_batch("a", 5, 2)
    assert (batch.seq, batch.stride, len(batch.events[0].keys)) == (12, 2, CHUNKS)
    assert len(batch.events) == 1


def test_a_checkpoint_has_host_memory_only_if_its_manifest_says_so() -> None:
    manifest = [b"5", b"12", b"1"]
    found = layout.parse_checkpoint([manifest, CHUNK_REPLIES + HOST_REPLIES, manifest], 5)
    device, host = found.as_batch("a", 5, 2).events
    assert (device.tier, len(device.keys)) == (Tier.GPU, CHUNKS)
    assert (host.tier, list(host.keys)) == (Tier.HOST, [7])
    older = [b"5", b"12", None]
    found = layout.parse_checkpoint([older, CHUNK_REPLIES + HOST_REPLIES, older], 5)
    assert len(found.as_batch("a", 5, 2).events) == 1, "chunks of an earlier checkpoint"


@pytest.mark.parametrize(
    ("before", "chunks", "after"),
    [
        ([None] * 3, [None] * CHUNKS, [None] * 3),
        ([b"5", b"12", b"0"], CHUNK_REPLIES, [b"5", b"13", b"0"]),
        ([b"4", b"12", b"0"], CHUNK_REPLIES, [b"4", b"12", b"0"]),
        ([b"5", b"12", b"0"], [None, *CHUNK_REPLIES[1:]], [b"5", b"12", b"0"]),
        ([b"5", b"12", b"0"], [b"123", *CHUNK_REPLIES[1:]], [b"5", b"12", b"0"]),
        ([b"5", b"x", b"0"], CHUNK_REPLIES, [b"5", b"x", b"0"]),
        (ResponseError("x"), CHUNK_REPLIES, ResponseError("x")),
        ([b"5", b"12", b"1"], CHUNK_REPLIES + [None] * CHUNKS, [b"5", b"12", b"1"]),
        ([b"5", b"12", b"0"], CHUNK_REPLIES, [b"5", b"12", b"1"]),
    ],
    ids=["none", "changed", "epoch", "expired", "cut", "text", "error", "host gone", "host new"],
)
def test_a_torn_checkpoint_is_none(before, chunks, after) -> None:
    assert layout.parse_checkpoint([before, chunks, after], 5) is None


def test_log_entries_are_read_and_strange_ones_told_apart() -> None:
    batch = EventBatch("a", 5, "worker", 1, 0.0, 1, (stored([1], None),))
    rows = [
        [b"1500-0", [b"b", encode_batch(batch)]],
        [b"1501-3", [b"b", b"\xc1"]],
        [b"1502-0", [b"other", b"1"]],
        [b"1503-0", None],
    ]
    entries = layout.parse_entries(KEYS, [[KEYS.log(2).encode(), rows]])
    assert [entry.batch() for entry in entries] == [batch, None, None, None]
    assert (entries[0].shard, entries[0].written_s) == (2, 1.5)
    assert layout.parse_entries(KEYS, None) == []


def test_small_replies() -> None:
    assert layout.id_order(b"9-2") < layout.id_order(b"10-1") < layout.id_order(b"10-11")
    assert layout.lookback_id(100.0) == b"65000-0"
    assert layout.lookback_id(1.0) == b"0-0"
    assert layout.server_time_s([b"5", b"250000"]) == 5.25
    with pytest.raises(ValueError, match="TIME"):
        layout.server_time_s(ResponseError("NOPERM"))
    assert layout.parse_last_id([b"length", 3, b"last-generated-id", b"7-1"]) == b"7-1"
    assert layout.parse_last_id(ResponseError("no such key")) is None
    assert layout.is_replica([b"slave", b"h"])
    assert not layout.is_replica([b"master", 0])
    assert not layout.is_replica(ResponseError("NOPERM"))


def test_bookings_survive_the_way() -> None:
    booked = {"a": Booked(1.5, 100, 2), "b": Booked(0.0, 0, 1)}
    assert decode_bookings(encode_bookings(booked)) == booked
    negative = encode_bookings({"a": Booked(-1.0, -5, -2)})
    assert decode_bookings(negative) == {"a": Booked(0.0, 0, 0)}
    with pytest.raises(msgspec.DecodeError):
        decode_bookings(b"\xc1")


@given(
    frames=st.lists(st.binary(max_size=40), max_size=12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_frames_are_whole_however_they_are_cut(frames, cuts) -> None:
    data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    parser, found = FrameParser(), []
    position = turn = 0
    while position < len(data):
        size = cuts[turn % len(cuts)]
        found += parser.feed(data[position : position + size])
        position, turn = position + size, turn + 1
    assert found == frames


def test_a_senseless_length_breaks_the_feed() -> None:
    with pytest.raises(FeedBroken):
        FrameParser().feed(b"\xff\xff\xff\xff")
