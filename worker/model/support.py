"""Does this model do what paged attention assumes? Asked once at load, by looking, not by name.

A model is taken only if each of its layers calls the attention interface once, with keyword
arguments whose meaning is known here, under a mask that is causal or a sliding window. Everything
else (recurrent and hybrid layers, attention sinks, position biases, chunked or bidirectional masks,
its own cache form) would give wrong tokens without an error, so it is refused with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import PreTrainedModel

from worker.model.kvcache import LayerSpec

if TYPE_CHECKING:  # PretrainedConfig before version 5
    from transformers import PreTrainedConfig

_PROBE = "headwater_probe"
_PROBE_TOKENS = 3
_LEAST_REACH = 64
_HARMLESS = frozenset(
    "scaling sliding_window position_ids cache past_key_values use_cache cache_position "
    "output_attentions output_hidden_states output_router_logits return_dict layer_past".split()
)
"""Keyword arguments that paged attention honours or that change nothing without a model cache.

The window is read off the mask, which is what the model was trained under; some models pass none.
"""
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Unsupported(Exception):
    """Why this model cannot be run right."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands in for the mask a layer would get; ``allows(batch, head, query, key)``."""

    allows: MaskFunction


@dataclass(slots=True)
class _Probe:
    """What the layers did during the probing forward."""

    reach: int
    layers: dict[nn.Module, LayerSpec] = field(default_factory=dict)


def check_config(config: PreTrainedConfig) -> None:
    """Refuse by what the configuration says, before any weight is read. Raises ``Unsupported``."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise Unsupported(f"{kind} is an encoder-decoder model")
    text = config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    other = sorted(set(layer_types or ()) - _LAYER_TYPES)
    if other:
        raise Unsupported(
            f"{kind} has layers of type {', '.join(other)}, whose state is not paged KV"
        )
    if getattr(text, "kv_lora_rank", None):
        raise Unsupported(f"{kind} uses latent attention (MLA), which needs its own cache")


def inspect_layers(model: PreTrainedModel, longest: int) -> dict[nn.Module, LayerSpec]:
    """Run a few tokens and note what each attention module keeps and sees.

    ``longest``: tokens of the longest sequence; a window beyond it is none.
    Leaves the model with the attention implementation it had. Raises ``Unsupported``.
    """
    kind = model.config.model_type
    if not model._supports_attention_backend:
        raise Unsupported(f"{kind} does not go through transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise Unsupported(f"{kind} computes logits for every token (no logits_to_keep)")
    text = model.config.get_text_config(decoder=True)
    probe = _Probe(reach=max(longest, _LEAST_REACH))
    _run_probe(model, probe)
    expected = text.num_hidden_layers
    if len(probe.layers) != expected:
        raise Unsupported(f"{len(probe.layers)} of {expected} layers of {kind} are plain attention")
    return probe.layers


def _run_probe(model: PreTrainedModel, probe: _Probe) -> None:
    AttentionInterface.register(_PROBE, _probe_attention)
    AttentionMaskInterface.register(_PROBE, _probe_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_PROBE)
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(
                input_ids=ids,
                position_ids=ids,
                use_cache=False,
                logits_to_keep=torch.tensor([0], device=model.device),
                probe=probe,
            )
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
        raise Unsupported(f"{model.config.model_type} cannot be probed: {error}") from error
    finally:
        model.set_attn_implementation(before)


def _probe_mask(*, mask_function: MaskFunction, **_: Any) -> _Mask:
    """In place of a mask: the rule itself."""
    return _Mask(mask_function)


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    probe: _Probe | None = None,
    **context: Any,
) -> tuple[Tensor, None]:
    """In place of attention: note the layer and return zeros of the right shape."""
    kind = type(module).__name__
    if probe is None:
        raise Unsupported(f"{kind} does not hand keyword arguments on to attention")
    if module in probe.layers:
        raise Unsupported(f"{kind} attends twice in one pass")
    cap = context.pop("softcap", None)
    if context.pop("dropout", None):
        raise Unsupported(f"{kind} uses dropout at inference")
    if context.pop("is_causal", True) is False:
        raise Unsupported(f"{kind} is not causal")
    unknown = sorted(k for k, v in context.items() if v is not None and k not in _HARMLESS)
    if unknown:
        raise Unsupported(f"{kind} passes {', '.join(unknown)}, which paged attention does not do")
    if (
        key.shape[:3] != value.shape[:3]
        or key.dtype != value.dtype
        or query.shape[1] % key.shape[1]
    ):
        raise Unsupported(f"{kind} has keys {tuple(key.shape)} and values {tuple(value.shape)}")
    if not isinstance(attention_mask, _Mask):
        raise Unsupported(f"{kind} builds its attention mask by itself")
    window = _window(attention_mask.allows, probe.reach, kind)
    probe.layers[module] = LayerSpec(
        key.shape[1], key.shape[3], value.shape[3], key.dtype, window, cap is not None
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _window(allows: MaskFunction, reach: int, kind: str) -> int | None:
    """Window of a causal mask, None if it never ends; looked up at positions up to ``reach``."""
    zero = torch.tensor(0)
    keys = torch.arange(reach + 1)
    window: int | None = None
    for query in sorted({reach - 1, reach // 2 + 1, reach // 3, min(11, reach - 1)}, reverse=True):
        seen = allows(zero, zero, torch.tensor(query), keys).expand(reach + 1)
        count = int(seen.sum())
        if window is None and query == reach - 1:
            window = None if count == reach else count
        expected = query + 1 if window is None else min(window, query + 1)
        if count != expected or not bool(seen[query - count + 1 : query + 1].all()):
            raise Unsupported(f"the mask of {kind} is neither causal nor a sliding window")
    return window
