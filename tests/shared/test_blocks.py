"""Fixed values of the hash chain: a change here breaks every index in use."""

from __future__ import annotations

import pytest
import xxhash

from shared.blocks import (
    SaltPoint,
    Scope,
    chain_keys,
    extend_chain,
    key_of,
    next_state,
    pack_tokens,
    stride_of,
    unpack_tokens,
    usable_tokens,
)


def test_the_chain_is_what_it_always_was() -> None:
    root = Scope("model", "tokenizer", "adapter", "salt").root(b"secret")
    assert root.hex() == "cd47610def31fa0b9b577e6b2503077f"
    assert [f"{key:016x}" for key in chain_keys(root, range(40))] == [
        "02fc96ce351eef24",
        "9af92b83d5b6b7c7",
    ]


def test_parts_of_a_scope_do_not_run_into_each_other() -> None:
    assert Scope("ab", "c").root(b"k") != Scope("a", "bc").root(b"k")
    assert Scope("m", "t", adapter="x").root(b"k") != Scope("m", "t", salt="x").root(b"k")


def test_an_incomplete_granule_has_no_key() -> None:
    root = Scope("m", "t").root(b"k")
    assert chain_keys(root, range(15)) == []
    keys, state = extend_chain(root, pack_tokens(range(15)))
    assert (keys, state) == ([], root)


@pytest.mark.parametrize(
    ("block", "stride"), [(1, 1), (8, 1), (16, 1), (32, 2), (64, 4), (24, 3), (784, 49)]
)
def test_strides(block: int, stride: int) -> None:
    assert stride_of(block) == stride


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="below 1"):
        stride_of(0)


@pytest.mark.parametrize(
    ("matched", "prompt", "block", "usable"),
    [
        (64, 64, 16, 48),
        (64, 65, 16, 64),
        (63, 100, 16, 48),
        (64, 100, 48, 48),
        (16, 0, 16, 0),
        (5, 6, 1, 5),
    ],
)
def test_usable(matched: int, prompt: int, block: int, usable: int) -> None:
    assert usable_tokens(matched, prompt, block) == usable


def test_token_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([2**32])
    assert pack_tokens([1, 2**32 - 1]) == b"\1\0\0\0\xff\xff\xff\xff"


def test_a_step_is_the_hash_of_state_granule_and_extra() -> None:
    root, data = Scope("m", "t").root(b"k"), pack_tokens(range(48))
    states = [root]
    for index, extra in enumerate((b"", b"picture", b"")):
        piece = states[-1] + data[index * 64 : index * 64 + 64] + extra
        states.append(xxhash.xxh3_128_digest(piece))
        assert next_state(states[-2], data[index * 64 : index * 64 + 64], extra) == states[-1]
    low = [int.from_bytes(state[8:], "big") for state in states[1:]]
    assert [key_of(state) for state in states[1:]] == low
    assert extend_chain(root, data, {1: b"picture"}) == (low, states[-1])
    assert extend_chain(root, data, {}) == extend_chain(root, data)


@pytest.mark.parametrize(("size", "keys"), [(63, 0), (64, 1), (65, 1), (127, 1), (128, 2)])
def test_only_full_granules_have_a_key(size: int, keys: int) -> None:
    found, state = extend_chain(b"s" * 16, bytes(size))
    assert len(found) == keys
    assert extend_chain(b"s" * 16, bytes(size // 64 * 64)) == (found, state)


@pytest.mark.parametrize(("shared", "granule"), [(1, 0), (15, 0), (16, 1), (31, 1), (32, 2)])
def test_a_salt_enters_the_granule_behind_what_is_shared(shared: int, granule: int) -> None:
    point = SaltPoint(shared, b"m" * 16)
    assert point.extras() == {granule: b"m" * 16}
    assert point.extras(done=1) == {granule - 1: b"m" * 16}


def test_a_chain_whose_salt_enters_later_is_what_it_always_was() -> None:
    root = Scope("model", "tokenizer").root(b"secret")
    mark = Scope("model", "tokenizer", salt="salt").root(b"secret")
    data = pack_tokens(range(40))
    public, _ = extend_chain(root, data)
    keys, _ = extend_chain(root, data, SaltPoint(20, mark).extras())
    assert keys[0] == public[0]
    assert f"{keys[1]:016x}" == "9eef304a6bd99d9e"


def test_tokens_are_read_back() -> None:
    tokens = [0, 1, 255, 1 << 16, 2**32 - 1]
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens
    assert unpack_tokens(b"").tolist() == []
