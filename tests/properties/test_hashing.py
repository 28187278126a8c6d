"""The identity of prefixes: chains can be continued anywhere, and scopes never meet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import (
    GRANULE,
    GRANULE_BYTES,
    Scope,
    chain_keys,
    extend_chain,
    key_of,
    next_state,
    pack_keys,
    pack_tokens,
    stride_of,
    unpack_keys,
    unpack_tokens,
    usable_tokens,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)
ROOT = Scope("m", "t").root(b"key")
NAME = st.text(max_size=4)


@given(TOKENS, st.integers(0, 6))
def test_a_chain_can_be_continued_at_any_granule(tokens: list[int], granules: int) -> None:
    data = pack_tokens(tokens)
    at = min(granules, len(tokens) // GRANULE) * GRANULE_BYTES
    first, state = extend_chain(ROOT, data[:at])
    rest, end = extend_chain(state, data[at:])
    assert first + rest == chain_keys(ROOT, tokens)
    assert (first + rest, end) == extend_chain(ROOT, data)
    assert len(first + rest) == len(tokens) // GRANULE


@given(TOKENS, TOKENS)
def test_keys_agree_exactly_as_far_as_the_tokens(one: list[int], other: list[int]) -> None:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    length = min(len(one), len(other)) if common is None else common
    pairs = list(zip(chain_keys(ROOT, one), chain_keys(ROOT, other), strict=False))
    equal = [a == b for a, b in pairs]
    assert equal == [True] * (length // GRANULE) + [False] * (len(pairs) - length // GRANULE)


@given(TOKENS)
def test_one_step_is_the_chain_of_one_granule(tokens: list[int]) -> None:
    state, keys = ROOT, []
    data = pack_tokens(tokens)
    for start in range(0, len(data) - GRANULE_BYTES + 1, GRANULE_BYTES):
        state = next_state(state, data[start : start + GRANULE_BYTES])
        keys.append(key_of(state))
    assert keys == chain_keys(ROOT, tokens)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=48, max_size=64), st.integers(0, 2))
def test_an_extra_changes_its_granule_and_all_after(tokens: list[int], at: int) -> None:
    data = pack_tokens(tokens)
    plain, _ = extend_chain(ROOT, data)
    mixed, _ = extend_chain(ROOT, data, {at: b"salt"})
    assert mixed[:at] == plain[:at]
    assert not set(mixed[at:]) & set(plain)


@given(st.tuples(NAME, NAME, NAME, NAME), st.tuples(NAME, NAME, NAME, NAME))
def test_roots_are_equal_only_for_equal_scopes(
    one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    assert (Scope(*one).root(b"k") == Scope(*other).root(b"k")) == (one == other)
    assert Scope(*one).root(b"k") != Scope(*one).root(b"l")


@given(TOKENS, st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_packing_is_reversible(tokens: list[int], keys: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(tokens))) == tokens
    assert list(unpack_keys(pack_keys(keys))) == keys


@given(st.integers(1, 2000))
def test_a_stride_covers_whole_blocks_and_whole_granules(block: int) -> None:
    tokens = stride_of(block) * GRANULE
    assert tokens % block == 0
    assert all(t % block or t % GRANULE for t in range(GRANULE, tokens, GRANULE))


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 64))
def test_usable_tokens_are_full_blocks_short_of_the_last_token(
    matched: int, prompt: int, block: int
) -> None:
    usable = usable_tokens(matched, prompt, block)
    assert usable % block == 0
    assert 0 <= usable <= matched
    assert usable < max(prompt, 1)
    if matched >= prompt > block:
        assert usable + block >= prompt - block
