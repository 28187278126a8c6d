"""Emulated events in the forms that releases of vLLM and SGLang have sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.emulators.cache import CacheNews, signed

_pack = msgspec.msgpack.Encoder().encode


def _vllm_array(news: CacheNews, size: int) -> Any:
    """Until 0.23."""
    if news.kind == "cleared":
        return ["AllBlocksCleared"]
    if news.kind == "removed":
        return ["BlockRemoved", list(news.ids), "GPU"]
    fields: list[Any] = [list(news.ids), news.parent, list(news.tokens), size, None, "GPU", None]
    if news.salt:
        fields.append([[news.salt], *[None] * (len(news.ids) - 1)])
    return ["BlockStored", *fields]


def _vllm_map(news: CacheNews, size: int) -> Any:
    """Since 0.24."""
    if news.kind == "cleared":
        return {"type": "AllBlocksCleared"}
    if news.kind == "removed":
        fields = {"block_hashes": list(news.ids), "medium": "GPU", "group_idx": 0}
        return {"type": "BlockRemoved", **fields}
    stored: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(news.ids),
        "parent_block_hash": news.parent,
        "token_ids": list(news.tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    if news.salt:
        stored["extra_keys"] = [[news.salt], *[None] * (len(news.ids) - 1)]
    return stored


def _sglang_array(news: CacheNews, size: int) -> Any:
    """Until 0.5.20."""
    if news.kind == "cleared":
        return ["AllBlocksCleared"]
    ids = [signed(one) for one in news.ids]
    if news.kind == "removed":
        return ["BlockRemoved", ids, "GPU"]
    parent = None if news.parent is None else signed(news.parent)
    fields = ["BlockStored", ids, parent, list(news.tokens), size, None, "GPU"]
    return [*fields, {"cache_salt": news.salt}] if news.salt else fields


def _sglang_map(news: CacheNews, size: int) -> Any:
    """Since 0.5.21."""
    if news.kind == "cleared":
        return {"type": "AllBlocksCleared"}
    ids = [signed(one) for one in news.ids]
    if news.kind == "removed":
        return {"type": "BlockRemoved", "block_hashes": ids, "medium": "GPU"}
    stored: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": ids,
        "parent_block_hash": None if news.parent is None else signed(news.parent),
        "token_ids": list(news.tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
    }
    return {**stored, "cache_salt": news.salt} if news.salt else stored


_FORMS: dict[tuple[str, str], Callable[[CacheNews, int], Any]] = {
    ("vllm", "array"): _vllm_array,
    ("vllm", "map"): _vllm_map,
    ("sglang", "array"): _sglang_array,
    ("sglang", "map"): _sglang_map,
}
GARBAGE = "garbage"
"""A form that nobody reads: an encoding of the future."""


def encode(engine: str, form: str, news: Sequence[CacheNews], size: int, at: float) -> bytes:
    """One batch. ``form``: ``array``, ``map`` or ``garbage``."""
    if form == GARBAGE:
        return b"\xc1" + _pack([at, len(news)])
    make = _FORMS[engine, form]
    return _pack([at, [make(one, size) for one in news], 0])
