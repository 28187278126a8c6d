"""Identity of a prompt prefix: one chain of hashes over granules of 16 tokens.

    s[-1] = HMAC-SHA256(deploy secret, length-prefixed scope)[:16]
    s[i]  = xxh3_128(s[i-1] || 16 x u32le token ids || extra_i)
    k[i]  = low 64 bits of s[i]              <- the index key

The granule is fixed for ever; a worker whose block is not 16 tokens is indexed at every
``stride = lcm(block, 16) / 16``-th key, so one hash pass serves a mixed fleet and a part of a
larger block is never credited. A key only *routes*: the worker compares token ids before it
reuses KV, so a collision can misroute a request but never change an answer.

Without a tokenizer the same chain runs over 64-byte pieces of the rendered text (text-block mode).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import xxhash

from shared.types import BlockKey

GRANULE = 16
"""Tokens per granule."""

GRANULE_BYTES = GRANULE * 4
"""Bytes per granule: 16 token ids as little-endian u32, or 64 bytes of text in text-block mode."""

HASH_VERSION = "hw1"
_LOW64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Scope:
    """What besides the tokens decides whether KV can be shared. All parts are opaque text."""

    model: str
    tokenizer: str
    """Fingerprint of tokenizer, chat template and special tokens; ``"text"`` in text-block mode."""
    adapter: str = ""
    salt: str = ""

    def root(self, secret: bytes) -> bytes:
        """First chain state (16 bytes); length prefixes tell a salt from an equal adapter name."""
        parts = (HASH_VERSION, self.model, self.tokenizer, self.adapter, self.salt)
        encoded = (part.encode() for part in parts)
        message = b"".join(len(part).to_bytes(4, "little") + part for part in encoded)
        return hmac.new(secret, message, hashlib.sha256).digest()[:16]


@dataclass(frozen=True, slots=True)
class SaltPoint:
    """Where a salt enters a chain that begins at a root without it: behind what all may share."""

    tokens: int
    """So many leading tokens are shared; at least 1."""
    mark: bytes
    """Root (16 bytes) of the scope with the salt. It is mixed into the granule, and is part of the
    block, that holds the first token behind them; whatever follows hangs below that one."""

    def extras(self, done: int = 0) -> dict[int, bytes]:
        """For :func:`extend_chain`, ``done`` granules into the chain."""
        return {self.tokens // GRANULE - done: self.mark}


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array("I", tokens)
    if packed.itemsize != 4:  # pragma: no cover - no platform we support
        raise TypeError("array('I') is not 32 bits wide here")
    return packed.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """Inverse of :func:`pack_tokens`; ``len(data)`` is a multiple of 4."""
    tokens: array[int] = array("I")
    tokens.frombytes(data)
    return tokens


def next_state(state: bytes, granule: bytes, extra: bytes = b"") -> bytes:
    """Chain state (16 bytes) after one full granule."""
    return xxhash.xxh3_128_digest(state + granule + extra)


def key_of(state: bytes) -> BlockKey:
    """Index key of a chain state: its low 64 bits."""
    return BlockKey(int.from_bytes(state, "big") & _LOW64)


def extend_chain(
    state: bytes, data: bytes, extras: Mapping[int, bytes] | None = None
) -> tuple[list[BlockKey], bytes]:
    """Hash every full granule of ``data``.

    :param state: chain state before ``data`` (16 bytes).
    :param data: packed tokens; what lies beyond the last full granule is left alone.
    :param extras: digest to mix in, by index of the granule within ``data``.
    :returns: one key per full granule, and the state after the last of them.
    """
    states = bytearray()
    digest = xxhash.xxh3_128_digest
    for index, start in enumerate(range(0, len(data) - GRANULE_BYTES + 1, GRANULE_BYTES)):
        piece = state + data[start : start + GRANULE_BYTES]
        if extras is not None and index in extras:
            piece += extras[index]
        state = digest(piece)
        states += state
    # The low half of each state, which is its second: digests are big-endian.
    keys: list[BlockKey] = list(struct.unpack(f">{len(states) // 8}Q", states)[1::2])
    return keys, state


def chain_keys(root: bytes, tokens: Sequence[int]) -> list[BlockKey]:
    """Keys of all full granules of ``tokens`` from a scope's root."""
    return extend_chain(root, pack_tokens(tokens))[0]


def stride_of(block_size: int) -> int:
    """Granules between two index keys of a worker with blocks of ``block_size`` tokens."""
    if block_size < 1:
        raise ValueError(f"block size {block_size} is below 1")
    return lcm(block_size, GRANULE) // GRANULE


def usable_tokens(matched: int, prompt_tokens: int, block_size: int) -> int:
    """How many of ``matched`` tokens a worker can reuse: full blocks only, never the last token."""
    if prompt_tokens < 1:
        return 0
    reusable = (prompt_tokens - 1) // block_size * block_size
    whole = matched // block_size * block_size
    return whole if whole < reusable else reusable


def pack_keys(keys: Iterable[int]) -> bytes:
    """Keys as little-endian u64."""
    return array("Q", keys).tobytes()


def unpack_keys(data: bytes) -> array[int]:
    """Inverse of :func:`pack_keys`."""
    keys: array[int] = array("Q")
    keys.frombytes(data)
    return keys
