"""Tenants share an approved beginning's full blocks, and nothing that one sends moves its end.

What the worker's pool finds, which keys it tells, and which keys the gateway looks for are held
against each other for any block size: they have to agree on where the salt begins.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.lease import path_of
from gateway.routing.base import Query
from shared.blocks import GRANULE, SaltPoint, Scope, extend_chain, pack_tokens
from shared.paging import BlockPool
from shared.segments import SegmentCache
from shared.sharedprefix import SharedPrefix
from shared.types import BlockKey, RequestId
from worker.sequence import BlockChain

PUBLIC = Scope("m", "t").root(b"secret")
ONE = Scope("m", "t", salt="one").root(b"secret")
TWO = Scope("m", "t", salt="two").root(b"secret")
TOKEN = st.integers(0, 3)
"""Few, so that tails of different tenants are often alike."""
APPROVED = st.lists(TOKEN, min_size=1, max_size=70)
TAIL = st.lists(TOKEN, max_size=70)
BLOCK = st.integers(1, 48)


def keys_of(tokens: list[int], salt: SaltPoint | None, root: bytes = PUBLIC) -> list[BlockKey]:
    """As the gateway has them."""
    extras = None if salt is None else salt.extras()
    return extend_chain(root, pack_tokens(tokens), extras)[0]


class Cache:
    """A worker's pool, filled and asked as the worker does it."""

    def __init__(self, block: int) -> None:
        self.pool, self.block = BlockPool(64 * 8, block, host_blocks=4), block

    def compute(self, tokens: list[int], salt: SaltPoint | None) -> list[BlockKey | None]:
        """One prompt is computed and done; the keys of its blocks."""
        chain = BlockChain(PUBLIC, self.block, salt)
        units = chain.units(tokens)
        held: list[int] = self.pool.match(PUBLIC, units)
        self.pool.acquire(held)
        keys: list[BlockKey | None] = [chain.key(index) for index in range(len(units))]
        for index in range(len(held), len(units)):
            (block,) = self.pool.allocate(1) or [-1]
            parent = held[-1] if held else None
            held.append(self.pool.seal(block, PUBLIC, parent, units[index], keys[index]))
        self.pool.release(held)
        self.pool.check()
        return keys

    def found(self, tokens: list[int], salt: SaltPoint | None) -> int:
        """Blocks that a prompt would reuse."""
        return len(self.pool.match(PUBLIC, BlockChain(PUBLIC, self.block, salt).units(tokens)))


@given(APPROVED, TAIL, TAIL, BLOCK)
def test_two_tenants_share_exactly_the_full_blocks_of_what_is_approved(
    approved: list[int], mine: list[int], theirs: list[int], block: int
) -> None:
    cache, n = Cache(block), len(approved)
    one, two = SaltPoint(n, ONE), SaltPoint(n, TWO)
    cache.compute(approved + mine, one)
    shared = n // block
    for tail in (mine, theirs, []):
        assert cache.found(approved + tail, two) == shared
        # Whoever has no salt shares as much, and no more: the tails lie below another block.
        assert cache.found(approved + tail, None) == shared
    assert cache.found(approved + mine, one) == len(approved + mine) // block
    # And back: what is computed without a salt behind it is for nobody that has one.
    cache.compute(approved + theirs, None)
    assert cache.found(approved + theirs, two) == shared


@given(APPROVED, TAIL, BLOCK)
def test_worker_and_gateway_have_the_same_keys(
    approved: list[int], tail: list[int], block: int
) -> None:
    tokens, cache = approved + tail, Cache(block)
    for salt in (SaltPoint(len(approved), ONE), SaltPoint(len(approved), TWO), None):
        sought = keys_of(tokens, salt)
        for index, key in enumerate(cache.compute(tokens, salt)):
            end = (index + 1) * block
            assert key == (None if end % GRANULE else sought[end // GRANULE - 1])
    told = set(cache.pool.snapshot_keys())
    apart = [set(keys_of(tokens, SaltPoint(len(approved), mark))) for mark in (ONE, TWO)]
    assert told & apart[0] & apart[1] <= set(keys_of(approved, None))


@given(APPROVED, TAIL)
def test_keys_behind_are_of_one_tenant_alone(approved: list[int], tail: list[int]) -> None:
    tokens, n = approved + tail, len(approved)
    kinds = [SaltPoint(n, ONE), SaltPoint(n, TWO), None]
    for one, two in pairwise([*kinds, kinds[0]]):
        mine, theirs = keys_of(tokens, one), keys_of(tokens, two)
        assert mine[: n // GRANULE] == theirs[: n // GRANULE]
        assert not set(mine[n // GRANULE :]) & set(theirs)
    # Nor are they those of a salt from the first token on.
    assert not set(keys_of(tokens, None, ONE)) & set(keys_of(tokens, kinds[0]))


@given(st.lists(TOKEN, min_size=16, max_size=130), st.integers(1, 40))
def test_what_a_ledger_keeps_of_two_tenants_differs_behind(tokens: list[int], n: int) -> None:
    def path(mark: bytes) -> tuple[int, ...]:
        keys = keys_of(tokens, SaltPoint(n, mark))
        return path_of(
            Query(RequestId("r"), "m", len(tokens), max_tokens=1, arrived=0.0, keys=keys)
        )

    # Kept after 128 tokens at the earliest: behind every beginning that is tried here.
    assert all(one != two for one, two in zip(path(ONE), path(TWO), strict=True))


@given(st.lists(TOKEN, max_size=60), st.data())
def test_no_prompt_makes_the_worker_share_more(prompt: list[int], data: st.DataObject) -> None:
    approved = data.draw(st.lists(TOKEN, min_size=1, max_size=8))
    if data.draw(st.booleans()):
        prompt = approved + prompt
    claim = SharedPrefix.of(b"secret", PUBLIC, pack_tokens(approved))
    begins = prompt[: len(approved)] == approved
    assert claim.holds(b"secret", PUBLIC, pack_tokens(prompt)) is begins
    # Further, or nearer, or for another scope, or made without the secret: nothing.
    for tokens in {1, len(approved) - 1, len(approved) + 1, len(prompt)} - {len(approved), 0}:
        moved = SharedPrefix(tokens, claim.code)
        assert not moved.holds(b"secret", PUBLIC, pack_tokens(prompt))
    assert not claim.holds(b"secret", ONE, pack_tokens(prompt))
    assert not claim.holds(b"guess", PUBLIC, pack_tokens(prompt))
    assert SharedPrefix.read(claim.text) == claim


@given(st.text(alphabet="0123456789abcdef:- +_\n٣", max_size=46))
def test_only_claims_are_read(text: str) -> None:
    claim = SharedPrefix.read(text)
    assert claim is None or (claim.text == text and claim.tokens >= 1)


@given(
    st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([ONE, TWO])), max_size=6),
)
def test_remembered_chains_are_those_of_their_salt(
    pieces: list[bytes], salts: list[tuple[int, bytes]]
) -> None:
    """The memory of chains is one for all tenants."""
    cache = SegmentCache(1 << 20)
    packed = [pack_tokens(list(piece)) for piece in pieces]
    segments = [cache.add(str(i), tokens) for i, tokens in enumerate(packed)]
    tokens = [token for piece in pieces for token in piece]
    for salt in [None, *(SaltPoint(n, mark) for n, mark in salts), None]:
        for count in (len(segments) // 2, len(segments)):
            size = sum(map(len, pieces[:count]))
            assert cache.chain(PUBLIC, segments[:count], salt) == keys_of(tokens[:size], salt)
