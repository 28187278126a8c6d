"""Decoder layers that ``cpu_layer.c`` can compute: looked for by name, then proved by numbers.

An ordinary layer is a norm, attention with rotary positions, a norm and a gated product, with sums
around both halves, as in Llama, Mistral, Qwen2 and Qwen3. Names alone prove nothing (Granite scales
its sums, SmolLM3 leaves out some rotations), so each layer is compared with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.model.batch import Layout, StepBatch, build_batch
from worker.model.cpu_native import Largest, NativeProduct, first_largest
from worker.model.kvcache import KvPool, LayerSpec
from worker.model.packed import KernelNorm
from worker.model.sameinput import SharingLinear
from worker.model.selfcheck import distance
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

_LENGTHS = (1, 3, 18)
"""Tokens of the sequences of the trial; another token of each follows, because decodes, and steps
of nothing else, go another way than chunks."""
_BLOCKS, _BLOCK = 8, 4
_EXACT, _ROUNDED = 1e-4, 0.05
"""Largest distance of what one layer makes; the second where its products round to int8."""


class NotOrdinary(Exception):
    """What is not as in an ordinary layer."""


@dataclass(frozen=True, slots=True)
class OrdinaryLayer:
    """What a layer consists of, and its sizes."""

    attention: nn.Module
    qkv: NativeProduct
    o: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct
    norm_before: Tensor
    norm_after: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    scale: float
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    between: int
    window: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the memory of a step depends on."""
        return self.hidden, self.heads, self.kv_heads, self.dim, self.between


def ordinary(layer: Any, specs: Mapping[nn.Module, LayerSpec]) -> OrdinaryLayer:
    """The parts of a decoder layer. Raises ``NotOrdinary`` if some are missing or do not fit."""
    try:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = _product(attention.q_proj, attention.k_proj, attention.v_proj)
        o, down = _product(attention.o_proj), _product(mlp.down_proj)
        gate_up = _product(mlp.gate_proj, mlp.up_proj)
        norms = [_norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)]
        norms += [_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
        hidden, between = attention.q_proj.in_features, mlp.down_proj.in_features
        spec, width = specs[attention], attention.o_proj.in_features
    except (AttributeError, KeyError) as error:
        raise NotOrdinary(f"{type(layer).__name__}: {error}") from error
    before, after, q_norm, k_norm = norms
    dim = spec.key_dim
    heads = width // dim
    fits = (
        (before is not None and after is not None)
        and len({product.function for product in (qkv, o, gate_up, down)}) == 1
        and (spec.value_dim == dim and dim % 2 == 0 and not spec.capped)
        and qkv.outputs == width + 2 * spec.kv_heads * dim
        and gate_up.outputs == 2 * between
        and o.outputs == down.outputs == hidden
        and len({eps for _, eps in filter(None, norms)}) == 1
    )
    if not fits:
        raise NotOrdinary(f"{type(layer).__name__} has other sizes")
    assert before is not None
    assert after is not None
    return OrdinaryLayer(
        attention,
        *(qkv, o, gate_up, down),
        before[0],
        after[0],
        None if q_norm is None else q_norm[0],
        None if k_norm is None else k_norm[0],
        before[1],
        float(getattr(attention, "scaling", dim**-0.5)),
        *(hidden, heads, spec.kv_heads, dim, between),
        spec.window,
    )


def _product(*layers: nn.Module) -> NativeProduct:
    """The one product of all these layers."""
    shared = {
        id(layer.shared): layer.shared for layer in layers if isinstance(layer, SharingLinear)
    }
    if len(shared) == 1 and all(isinstance(layer, SharingLinear) for layer in layers):
        (product,) = (each.product for each in shared.values())
        if isinstance(product, NativeProduct):
            return product
    raise NotOrdinary(f"{type(layers[0]).__name__} is multiplied otherwise")


def product_with_largest(head: nn.Module) -> Callable[[Tensor], tuple[Tensor, Largest]] | None:
    """The product of an output head that finds the largest of each row as well, if it has one."""
    if not isinstance(head, SharingLinear) or head.shared.parts != 1:
        return None
    product = head.shared.product
    return product.with_largest if isinstance(product, NativeProduct) else None


def _norm(module: nn.Module | None) -> tuple[Tensor, float] | None:
    """Weights of a norm with its offset added, and its epsilon."""
    if module is None:
        return None
    if not isinstance(module, KernelNorm):
        raise NotOrdinary(f"{type(module).__name__} is another norm")
    return (module.weight + module.offset).detach(), module.eps


def prove(
    model: Any,
    specs: Mapping[nn.Module, LayerSpec],
    layout: Layout,
    through: Callable[[Tensor, StepBatch, slice], None],
    around: Callable[[StepBatch, slice], Tensor],
    largest: Callable[[Tensor], Largest],
    *,
    rounded: bool,
) -> None:
    """Raises ``NotOrdinary`` unless the functions do what the model's own code does.

    :param through: replaces hidden states by what some layers make of them.
    :param around: logits of a batch with some of the layers only.
    :param largest: finds the largest of each row of these logits.
    :param rounded: products round to int8, where a last digit may decide.
    """
    decoder, limit = model.get_decoder(), _ROUNDED if rounded else _EXACT
    pools = [KvPool(specs, _BLOCKS, _BLOCK, layout.device) for _ in range(2)]
    steps = [
        [build_batch(plan, pool, layout) for pool in pools]
        for plan in _plans(model.config.vocab_size)
    ]
    random = torch.Generator().manual_seed(7)
    width = decoder.embed_tokens.weight.shape[1]
    with torch.inference_mode():
        for number, layer in enumerate(decoder.layers):
            for theirs, ours in steps:
                x = torch.randn((theirs.ids.shape[1], width), generator=random)
                wanted = _own(decoder, layer, x, theirs)
                through(x, ours, slice(number, number + 1))
                _compare(f"layer {number}", x, wanted, limit)
        for theirs, ours in steps:
            made = around(ours, slice(1))
            if largest(made) != first_largest(made):
                raise NotOrdinary("the largest logit is found elsewhere")
            _compare("what is around the layers", made, _one_layer_deep(model, theirs), limit)


def _compare(what: str, made: Tensor, wanted: Tensor, limit: float) -> None:
    apart = distance(made, wanted)
    if not apart < limit:
        raise NotOrdinary(f"{what} differs from the model's own code by {apart:.1e}")


def _own(decoder: Any, layer: Any, x: Tensor, batch: StepBatch) -> Tensor:
    """What the model's own layer makes of ``x`` ``[T, hidden]``."""
    try:
        made = layer(
            x[None].clone(),
            attention_mask=None,
            position_ids=batch.positions,
            position_embeddings=decoder.rotary_emb(x[None], position_ids=batch.positions),
            use_cache=False,
            paged=batch,
        )
    except (TypeError, AttributeError) as error:
        raise NotOrdinary(f"{type(layer).__name__} is called otherwise: {error}") from error
    out: Tensor = made[0] if isinstance(made, tuple) else made
    return out.reshape(x.shape)


def _one_layer_deep(model: Any, batch: StepBatch) -> Tensor:
    """Logits of the model with its first layer only; with none, a factor of the embedding would
    vanish in the norm at the end."""
    decoder = model.get_decoder()
    layers, decoder.layers = decoder.layers, decoder.layers[:1]
    try:
        out = model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.sampled_rows,
            paged=batch,
        )
    finally:
        decoder.layers = layers
    logits: Tensor = out.logits[0]
    return logits


def _plans(vocabulary: int) -> tuple[StepPlan, StepPlan]:
    """A step of prompts, and one of a token more of each."""
    prompts, decodes, first = [], [], 0
    for number, length in enumerate(_LENGTHS):
        count = -(-(length + 1) // _BLOCK)
        blocks = tuple(range(first, first + count))
        first += count
        tokens = tuple((97 * i + 5) % vocabulary for i in range(length + 1))
        name, params = f"trial {number}", SamplingParams()
        prompts.append(Chunk(name, 0, tokens[:-1], blocks, sample=True, params=params))
        decodes.append(Chunk(name, length, tokens[-1:], blocks, sample=True, params=params))
    return StepPlan(tuple(prompts)), StepPlan(tuple(decodes))
