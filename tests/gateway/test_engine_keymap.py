"""Engine events become exactly the keys that prompts have, whatever the block size."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engines.aliastable import Added, AliasTable
from gateway.engines.base import Cleared, EngineEvent, Frame, Removed, Stored
from gateway.engines.keymap import KeyMap
from gateway.engines.ranks import RankMerge
from shared.blocks import Scope, chain_keys, stride_of
from shared.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from shared.types import Tier

SECRET = b"s"


def root(adapter: str, salt: str) -> bytes | None:
    if adapter == "nobody":
        return None
    return Scope("m", "tok", adapter=adapter, salt=salt).root(SECRET)


def keys(tokens: list[int], size: int, adapter: str = "", salt: str = "") -> list[int]:
    """Index keys of a prompt for a worker with blocks of ``size``."""
    begin = root(adapter, salt)
    assert begin is not None
    whole = tokens[: len(tokens) // size * size]
    stride = stride_of(size)
    return [int(key) for key in chain_keys(begin, whole)[stride - 1 :: stride]]


def block(
    tokens: list[int], size: int, first: int = 0, last: int | None = None, base: int = 1000, **more
) -> Stored:
    """Blocks ``first .. last`` of a prompt; block i is called ``base + i``."""
    end = len(tokens) // size if last is None else last
    return Stored(
        ids=tuple(base + i for i in range(first, end)),
        parent=base + first - 1 if first else None,
        tokens=tokens[first * size : end * size],
        block_size=size,
        **more,
    )


class Index:
    """What a gateway would hold after some events."""

    def __init__(self, size: int) -> None:
        self.map = KeyMap(root, size)
        self.held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.now = 0.0

    def take(self, *events: EngineEvent) -> Index:
        self.apply(self.map.take(Frame(events), self.now))
        return self

    def apply(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, CacheCleared):
                for held in self.held.values():
                    held.clear()
            elif isinstance(event, BlocksRemoved):
                assert set(event.keys) <= self.held[event.tier]
                self.held[event.tier] -= set(event.keys)
            elif isinstance(event, BlocksStored):
                assert not set(event.keys) & self.held[event.tier]
                self.held[event.tier] |= set(event.keys)
        assert {t: set(k) for t, k in self.map.contents().items()} == self.held

    @property
    def gpu(self) -> set[int]:
        return self.held[Tier.GPU]


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 8, 15, 16, 17, 24, 32, 64, 784]),
    blocks=st.integers(1, 60),
    cuts=st.lists(st.integers(1, 59), max_size=6),
)
def test_stored_blocks_have_the_keys_of_the_prompt(size: int, blocks: int, cuts: list[int]) -> None:
    tokens = [(i * 7919 + 13) % 50_000 for i in range(min(blocks, 4 if size == 784 else 60) * size)]
    edges = sorted({0, len(tokens) // size, *(c for c in cuts if c < len(tokens) // size)})
    index = Index(size)
    for first, last in itertools.pairwise(edges):
        index.take(block(tokens, size, first, last))
    assert index.gpu == set(keys(tokens, size))
    for at in reversed(range(len(tokens) // size)):
        index.take(Removed((1000 + at,)))
        assert index.gpu == set(keys(tokens[: at * size], size))
    assert not len(index.map)
    assert not index.map.n_bytes % 1


def test_a_parent_that_comes_late_is_waited_for_and_never_guessed() -> None:
    tokens = list(range(160))
    index = Index(16)
    index.take(block(tokens, 16, 6, 10), block(tokens, 16, 3, 6))
    assert not index.gpu
    index.take(block(tokens, 16, 0, 3))
    assert index.gpu == set(keys(tokens, 16))
    index.take(Removed((1009, 1008)))
    assert index.gpu == set(keys(tokens[:128], 16))


def test_what_is_removed_while_it_waits_for_its_parent_does_not_come_back() -> None:
    tokens = list(range(96))
    index = Index(16)
    index.take(block(tokens, 16, 3, 6), Removed((1005, 1004)), block(tokens, 16, 0, 3))
    assert index.gpu == set(keys(tokens[:64], 16))


def test_an_orphan_is_given_up_after_its_time_and_counted() -> None:
    tokens = list(range(96))
    index = Index(16)
    index.take(block(tokens, 16, 3, 6))
    index.now = 6.0
    assert index.map.expire(index.now) == 1
    index.take(block(tokens, 16, 0, 3))
    assert index.gpu == set(keys(tokens[:48], 16))


def test_copies_are_counted_and_repeated_announcements_are_not_copies() -> None:
    tokens = list(range(48))
    index = Index(16)
    index.take(block(tokens, 16), block(tokens, 16), Removed((1002,)))
    assert index.gpu == set(keys(tokens, 16))
    index.take(Removed((1002,)))
    assert index.gpu == set(keys(tokens[:32], 16))
    again = Index(16)
    again.take(block(tokens, 16), block(tokens, 16, repeats=True), Removed((1002, 1001)))
    assert again.gpu == set(keys(tokens[:16], 16))


def test_tiers_are_apart_and_a_move_needs_no_tokens() -> None:
    tokens = list(range(48))
    index = Index(16)
    index.take(block(tokens, 16))
    index.take(Stored((1000, 1001, 9), None, [], 0, tier=Tier.HOST))
    index.take(Removed((1000, 1001, 1002)))
    assert not index.gpu
    assert index.held[Tier.HOST] == set(keys(tokens[:32], 16))
    index.take(block(tokens, 16, 0, 1))
    assert index.gpu == set(keys(tokens[:16], 16))


def test_salts_and_adapters_are_scopes_and_an_unknown_one_is_left_out_with_its_children() -> None:
    tokens = list(range(64))
    index = Index(16)
    index.take(block(tokens, 16, 0, 2, salt="s", adapter="a"), block(tokens, 16, 2))
    assert index.gpu == set(keys(tokens, 16, "a", "s"))
    for adapter in ("nobody", None):
        other = Index(16)
        other.take(block(tokens, 16, 0, 2, adapter=adapter), block(tokens, 16, 2))
        assert not other.gpu
        assert other.map.stats.unscoped == 2
        assert not other.map.stats.orphans


def test_blocks_with_other_inputs_than_tokens_match_no_plain_prompt() -> None:
    tokens = list(range(64))
    index = Index(16)
    index.take(block(tokens, 16, extras=(b"", b"picture", b"", b"")))
    plain = keys(tokens, 16)
    assert set(plain) & index.gpu == {plain[0]}
    assert len(index.gpu) == 4


def test_of_several_groups_the_one_that_forms_prefixes_is_indexed() -> None:
    tokens = list(range(64))
    index = Index(16)
    index.take(
        block(tokens, 16, base=1, group=0, kind="sliding_window"),
        block(tokens, 16, base=500, group=1, kind="full_attention"),
        block(tokens, 16, base=900, group=2, kind="full_attention"),
        Removed((1, 2, 3, 4), group=0),
        Removed((900, 901), group=2),
    )
    assert index.gpu == set(keys(tokens, 16))
    index.take(Removed((503,), group=1))
    assert index.gpu == set(keys(tokens[:48], 16))


def test_a_block_size_that_is_not_expected_is_named_and_not_indexed() -> None:
    index = Index(16)
    index.take(block(list(range(64)), 32))
    assert not index.gpu
    assert index.map.other_size == 32


def test_cleared_empties_all_and_the_stream_goes_on() -> None:
    tokens = list(range(64))
    index = Index(16)
    index.take(block(tokens, 16), Cleared(), block(tokens[:32], 16))
    assert index.gpu == set(keys(tokens[:32], 16))


def test_one_key_under_two_names_stays_until_both_are_gone() -> None:
    tokens = list(range(16))
    index = Index(16)
    index.take(block(tokens, 16, base=1), block(tokens, 16, base=2), Removed((1,)))
    assert index.gpu == set(keys(tokens, 16))
    index.take(Removed((2,)))
    assert not index.gpu


def test_too_many_unfinished_granules_are_noticed() -> None:
    small = KeyMap(root, 1, tail_rows=20)
    small.take(Frame((block(list(range(64)), 1),)), 0.0)
    assert small.full


def test_only_what_all_ranks_hold_is_told() -> None:
    tokens, merge = list(range(64)), RankMerge(2)
    maps = [KeyMap(root, 16), KeyMap(root, 16)]
    held = Index(16)

    def told(rank: int, *events: EngineEvent) -> set[int]:
        for event in merge.merge(rank, maps[rank].take(Frame(events), 0.0)):
            if isinstance(event, BlocksStored):
                held.gpu.update(event.keys)
            elif isinstance(event, BlocksRemoved):
                held.gpu.difference_update(event.keys)
        return held.gpu

    assert told(0, block(tokens, 16)) == set()
    assert told(1, block(tokens[:32], 16)) == set(keys(tokens[:32], 16))
    assert told(0, Removed((1001,))) == set(keys(tokens[:16], 16))
    assert told(1, Cleared()) == set()
    assert told(1, block(tokens, 16)) == set(keys(tokens, 16)) - {keys(tokens, 16)[1]}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 300), st.sampled_from(list(Tier))), max_size=400
    )
)
def test_the_compact_table_counts_as_a_dict_would(steps: list[tuple[bool, int, Tier]]) -> None:
    table, model = AliasTable(4), {}  # type: ignore[var-annotated]
    for add, key, tier in steps:
        row = model.get(key)
        if add:
            if row is not None and row.get(tier, 0) >= 14:
                continue
            added = table.add(key, tier, key.to_bytes(4, "big"))
            first = Added.ROW if row is None else Added.COPY if row.get(tier) else Added.TIER
            assert added is first
            row = model.setdefault(key, {})
            row[tier] = row.get(tier, 0) + 1
        else:
            last = row is not None and row.get(tier, 0) == 1
            assert table.remove(key, tier) == last
            if row is not None and row.get(tier):
                row[tier] -= 1
                if not any(row.values()):
                    del model[key]
        assert (table.get(key) is None) == (key not in model)
    assert len(table) == len(model)
    assert sorted(table) == sorted(model)
    assert all(table.get(key) == key.to_bytes(4, "big") for key in model)


def test_a_full_table_takes_few_bytes_a_row() -> None:
    table = AliasTable(16)
    for key in range(1, 50_000):
        table.add(key * 0x9E3779B97F4A7C15 & (1 << 64) - 1, Tier.GPU, bytes(16))
    assert table.n_bytes < 80 * len(table)
