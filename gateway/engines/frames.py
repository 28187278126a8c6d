"""Event frames of vLLM and SGLang (msgpack) -> plain events. Untrusted bytes: nothing is assumed.

    batch   [ts, events, rank?, ...]           or a map of the same names
    event   [tag, field, ...] in a fixed order  or a map with "type"

Both encodings are told apart per batch and per event, never by version. What trails behind the
fields that are known is passed over; an event that cannot be read is counted and the rest of its
batch goes on; a frame that is no batch at all raises :class:`MalformedFrame`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.engines.base import (
    Cleared,
    EngineEvent,
    Frame,
    MalformedFrame,
    Removed,
    Stored,
)
from shared.types import Tier

FRAME_LIMIT = 32 << 20
"""Bytes; a thousand prompts of a thousand blocks in one step."""
EVENTS_LIMIT = 65_536
BLOCK_LIMIT = 65_536
"""Tokens per block."""
SALT_LIMIT = 4096

_DECODER = msgspec.msgpack.Decoder()
_ENCODER = msgspec.msgpack.Encoder()
_LOW64 = (1 << 64) - 1
_TIERS = {
    "GPU": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_METADATA_FROM = 6
"""Field from which on SGLang may put a map of metadata in an array."""
_SALT_PREFIX = "dynamo-cache-salt:"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where the two engines differ."""

    rank: str
    """Name of the rank in a batch that is a map."""
    metadata: bool = False
    """A stored event in array form may carry a map with ``cache_salt``."""
    repeats: bool = False
    """Events in map form may announce blocks once more that are there already."""


VLLM = Dialect("data_parallel_rank", repeats=True)
SGLANG = Dialect("attn_dp_rank", metadata=True)


class _Malformed(ValueError):
    """One event cannot be read."""


def decode(payload: bytes, dialect: Dialect) -> Frame:
    """A batch of events. Raises :class:`MalformedFrame`."""
    if len(payload) > FRAME_LIMIT:
        raise MalformedFrame(f"{len(payload)} bytes")
    try:
        batch = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise MalformedFrame(str(error)[:200]) from None
    at, raw, rank = _open(batch, dialect)
    events: list[EngineEvent] = []
    malformed = unknown = 0
    for one in raw:
        try:
            event = _event(one, dialect)
        except (_Malformed, TypeError, ValueError, OverflowError):
            malformed += 1
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return Frame(tuple(events), at, rank, malformed, unknown)


def _open(batch: object, dialect: Dialect) -> tuple[float, list[Any], int | None]:
    if isinstance(batch, dict):
        at, raw, rank = batch.get("ts"), batch.get("events"), batch.get(dialect.rank)
    elif isinstance(batch, list) and len(batch) >= 2:
        at, raw, rank = batch[0], batch[1], batch[2] if len(batch) > 2 else None
    else:
        raise MalformedFrame("no batch of events")
    if isinstance(at, bool) or not isinstance(at, int | float) or not isinstance(raw, list):
        raise MalformedFrame("no batch of events")
    if len(raw) > EVENTS_LIMIT:
        raise MalformedFrame(f"{len(raw)} events")
    return float(at), raw, rank if type(rank) is int and rank >= 0 else None


def _event(one: object, dialect: Dialect) -> EngineEvent | None:
    """One event; None: of a kind that is not known here."""
    if isinstance(one, dict):
        tag, fields = one.get("type"), one
    elif isinstance(one, list) and one:
        tag = one[0]
        fields = _named(tag, one[1:], dialect)
    else:
        raise _Malformed
    if not isinstance(tag, str):
        raise _Malformed
    if tag == "BlockStored":
        return _stored(fields, dialect, in_map=isinstance(one, dict))
    if tag == "BlockRemoved":
        tier, group = _tier(fields.get("medium")), _optional_int(fields.get("group_idx"))
        return Removed(_ids(fields.get("block_hashes")), tier, group)
    return Cleared() if tag == "AllBlocksCleared" else None


def _named(tag: object, values: Sequence[Any], dialect: Dialect) -> dict[str, Any]:
    fields = dict(zip(_STORED if tag == "BlockStored" else _REMOVED, values, strict=False))
    if dialect.metadata and tag == "BlockStored":
        for place, value in enumerate(values[_METADATA_FROM:], _METADATA_FROM):
            if isinstance(value, dict):
                if place < len(_STORED):
                    del fields[_STORED[place]]
                fields.setdefault("cache_salt", value.get("cache_salt"))
                break
    return fields


def _stored(fields: Mapping[str, Any], dialect: Dialect, *, in_map: bool) -> Stored:
    ids = _ids(fields.get("block_hashes"))
    parent = fields.get("parent_block_hash")
    tokens = _tokens(fields.get("token_ids"))
    size = fields.get("block_size")
    if type(size) is not int or not 0 <= size <= BLOCK_LIMIT or not ids:
        raise _Malformed
    if tokens:
        # Under context parallelism a block of the pool is several of what is called a block.
        size, rest = divmod(len(tokens), len(ids))
        if rest or not 1 <= size <= BLOCK_LIMIT:
            raise _Malformed
    keys = fields.get("extra_keys")
    adapter = _adapter(fields, keys)
    salt, extras = _extras(keys, len(ids), adapter)
    told = fields.get("cache_salt")
    kind = fields.get("kv_cache_spec_kind")
    return Stored(
        ids=ids,
        parent=None if parent is None else _id(parent),
        tokens=tokens,
        block_size=size,
        tier=_tier(fields.get("medium")),
        adapter=adapter,
        salt=_text(told) or salt,
        extras=extras,
        group=_optional_int(fields.get("group_idx")),
        kind=kind if isinstance(kind, str) else None,
        repeats=in_map and dialect.repeats,
    )


def _adapter(fields: Mapping[str, Any], keys: object) -> str | None:
    """Name of the adapter; None: there is one, but it is not named."""
    name = fields.get("lora_name")
    if isinstance(name, str) and name:
        return name
    if fields.get("lora_id") is None:
        return ""
    first = keys[0] if isinstance(keys, list) and keys else None
    named = first[0] if isinstance(first, list) and first else None
    if isinstance(named, list) and len(named) == 2 and named[0] == "lora":
        named = named[1]
    return named if isinstance(named, str) and named else None


def _extras(keys: object, n_blocks: int, adapter: str | None) -> tuple[str, tuple[bytes, ...]]:
    """(salt of the first block, what else decides whether each block can be shared)."""
    if keys is None:
        return "", ()
    if not isinstance(keys, list) or len(keys) != n_blocks:
        raise _Malformed
    salt, extras = "", []
    for place, entry in enumerate(keys):
        rest = []
        for part in entry if isinstance(entry, list) else ():
            kind, value = _classify(part)
            if kind == "lora" or (kind == "text" and value == adapter):
                continue
            if place == 0 and not salt and kind in ("cache_salt", "text"):
                salt = _text(value)
                continue
            rest.append(part)
        extras.append(_ENCODER.encode(rest) if rest else b"")
    return salt, tuple(extras) if any(extras) else ()


def _classify(part: object) -> tuple[str, object]:
    """What one extra key is: bare text, a tagged pair, or something else."""
    if isinstance(part, str):
        if part.startswith(_SALT_PREFIX):
            return "cache_salt", part.removeprefix(_SALT_PREFIX)
        return "text", part
    if isinstance(part, list) and len(part) == 2 and isinstance(part[1], str):
        return str(part[0]), part[1]
    return "other", part


def _ids(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise _Malformed
    return tuple([_id(value) for value in values])


def _id(value: object) -> int:
    """An engine's hash in 64 bits: an int of either sign, or the end of a digest."""
    if type(value) is int:
        return value & _LOW64
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise _Malformed


def _tokens(values: object) -> Sequence[int]:
    if not isinstance(values, list):
        raise _Malformed
    if values and isinstance(values[0], list):
        # Bigrams of a speculative model: block i begins with the first token of its first pair.
        values = [pair[0] for pair in values if len(pair) == 2]
    return array("I", values)


def _tier(medium: object) -> Tier:
    if medium is None:
        return Tier.GPU
    if not isinstance(medium, str):
        raise _Malformed
    # A medium that is not known here is no device either: it counts as the farthest.
    return _TIERS.get(medium, Tier.DISK)


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= SALT_LIMIT else ""


def _optional_int(value: object) -> int | None:
    return value if type(value) is int else None
