"""Which kernel serves a model on its device: asked by running each one, not by version numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from worker.model.kernels.base import Chunked, Kernel
from worker.model.kernels.inplace import InPlace
from worker.model.kernels.table import BlockTable, newer_flash
from worker.model.kvcache import KvPool, LayerKv, LayerSpec

KERNELS: tuple[Kernel, ...] = (BlockTable(), InPlace())
"""The better one first."""

_TOKENS = (1_061, 3, 1_400, 530)
"""Lengths of the probe's sequences. Few rows and long contexts: where kernels split the keys."""
_NEW = ((1, 1, 1, 1), (1, 3, 200, 17))
"""Query rows of each: a decode step, and one with chunks of prompts."""
_HEADS, _GROUP = 2, 4
_MOST = 0.02
"""Largest distance from the exact answer, relative to it: half precision stays under 0.005."""

log = structlog.get_logger(__name__)


def choose(
    device: torch.device,
    layers: Sequence[LayerKv],
    block_size: int,
    kernels: Sequence[Kernel] = KERNELS,
) -> Kernel | None:
    """The first kernel that computes the right thing here; None if each sequence is to go alone.

    Logs why a kernel that is meant for the device was passed over.
    """
    if device.type == "cuda":
        _activate_newer_flash(device)
    for kernel in kernels:
        reason = kernel.refusal(device, layers, block_size)
        if not reason:
            reason = probe(kernel, device, {layer.spec for layer in layers}, block_size)
        if not reason:
            log.info("attention_kernel", kernel=kernel.name)
            return kernel
        if device.type == "cuda":
            log.warning("attention_kernel_passed_over", kernel=kernel.name, reason=reason)
    return None


def probe(kernel: Kernel, device: torch.device, specs: set[LayerSpec], block_size: int) -> str:
    """What is wrong with a kernel on this device, by real calls; empty if nothing."""
    try:
        with torch.inference_mode():
            for spec in specs:
                # pytorch issue 194167 needs as many query heads as KV heads; most models have more
                for group in (1, _GROUP):
                    for new in _NEW:
                        distance = _distance(kernel, device, spec, block_size, new, group)
                        if not distance < _MOST:
                            return f"is off by {distance:.1e} with {group} queries a KV head"
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ""


def _distance(
    kernel: Kernel,
    device: torch.device,
    spec: LayerSpec,
    block_size: int,
    new: Sequence[int],
    group: int,
) -> float:
    """Largest error of one step, relative to the largest value; rows nobody wrote count as such."""
    spec = replace(spec, kv_heads=_HEADS)
    counts = [-(-tokens // block_size) for tokens in _TOKENS]
    layer_of = torch.nn.Identity()
    pool = KvPool({layer_of: spec}, sum(counts) + 1, block_size, device)
    layer = pool.layers[layer_of]
    layer.keys.copy_(_noise(layer.keys, 1))
    layer.values.copy_(_noise(layer.values, 2))
    chunks = _chunks(counts, new, block_size)
    rows = sum(new)
    query = _noise(layer.keys.new_empty(_HEADS * group, rows, spec.key_dim), 3)
    scale = spec.key_dim**-0.5
    torch.full_like(query, float("nan"))  # so that memory reused for the answer is not zero
    ours = kernel.prepare(chunks, pool, device)(query, layer, scale).float()
    exact = _exact(query.float(), layer, chunks, block_size, scale)
    return float((ours - exact).abs().max() / exact.abs().max())


def _chunks(counts: Sequence[int], new: Sequence[int], block_size: int) -> list[Chunked]:
    """One sequence's blocks are scattered, the others' follow one another."""
    chunks, first, row = [], 1, 0
    for line, (tokens, count, length) in enumerate(zip(_TOKENS, counts, new, strict=True)):
        blocks = tuple(range(first, first + count))
        scattered = line == 2
        chunks.append(
            Chunked(
                row,
                length,
                tokens - length,
                blocks[::-1] if scattered else blocks,
                None if scattered else first * block_size,
            )
        )
        first, row = first + count, row + length
    return chunks


def _exact(
    query: Tensor, layer: LayerKv, chunks: Sequence[Chunked], block_size: int, scale: float
) -> Tensor:
    """``[T, Hq, D]`` by a plain masked softmax in float32."""
    parts = []
    for chunk in chunks:
        blocks = torch.tensor(chunk.blocks, device=query.device)
        keys, values = (
            cache.reshape(_HEADS, -1, block_size, cache.shape[2])[:, blocks]
            .flatten(1, 2)[:, : chunk.end]
            .float()
            for cache in (layer.keys, layer.values)
        )
        group = query.shape[0] // keys.shape[0]
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        at = torch.arange(chunk.start, chunk.end, device=query.device)[:, None]
        other = torch.arange(chunk.end, device=query.device)
        seen = other <= at
        if layer.spec.window is not None:
            seen &= other > at - layer.spec.window
        scores = query[:, chunk.row : chunk.row + chunk.length] @ keys.transpose(1, 2) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append((weights @ values).transpose(0, 1))
    return torch.cat(parts)


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def _activate_newer_flash(device: torch.device) -> None:
    """FlashAttention 3, where its package is installed and the card is a Hopper."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None or newer_flash() or torch.cuda.get_device_capability(device)[0] != 9:
        return
    if importlib.util.find_spec("flash_attn_interface") is None:
        return
    try:
        activate("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        log.warning("flash_attention_3_unusable", reason=str(error).splitlines()[0])
