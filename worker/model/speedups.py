"""Settings that make steps faster where they work, and are refused with the reason elsewhere."""

from __future__ import annotations

import dataclasses

import structlog
import torch

from shared.errors import ConfigError
from worker.config import ModelConfig
from worker.model.attention import ATTENTION, register
from worker.model.batch import Layout
from worker.model.compiled import CompiledForward
from worker.model.cpu_compile import NoCpuKernels, load_cpu_kernels
from worker.model.cpu_int8 import Int8Kernel, load_int8_kernel
from worker.model.cpu_layer import LayerForward
from worker.model.fetch import Progress, cache_root
from worker.model.ordinary import NotOrdinary, prove
from worker.model.packed import pack_linears, replace_norms
from worker.model.recorded import CudaRecorder, Recorder
from worker.model.selfcheck import plain_logits
from worker.model.weights import LoadedModel

log = structlog.get_logger(__name__)


def compile_model(
    loaded: LoadedModel, progress: Progress, backend: str = "inductor"
) -> LoadedModel:
    """The model with its forward compiled for every kind of step. Raises ``ConfigError``."""
    progress("compiling the model (model.compile), which takes minutes")
    forward = CompiledForward(loaded.model, loaded.layers, backend)
    try:
        forward.warm_up(loaded.layers, loaded.device)
    except (RuntimeError, ImportError, TypeError) as error:
        reason = f"torch.compile fails on this model: {str(error).strip().splitlines()[0]}"
        raise ConfigError("model.compile", True, reason) from error
    return dataclasses.replace(loaded, compiled=forward)


def with_cpu_kernels(loaded: LoadedModel, model: ModelConfig, threads: int) -> LoadedModel:
    """The model with the worker's own kernels, if it is on a CPU in float32 and they can be had.

    Unless its weights are to be quantized, which comes later, or compiled, they are packed in
    place. Raises ``ConfigError`` if the model does not run with packed weights.
    """
    if loaded.device.type != "cpu" or loaded.dtype != torch.float32 or not model.cpu_kernels:
        return loaded
    try:
        kernels = load_cpu_kernels(cache_root(model.cache_dir) / "kernels", threads)
    except (NoCpuKernels, OSError) as error:
        log.warning("cpu_kernels_unavailable", reason=str(error), instead="torch's own functions")
        return loaded
    if not model.compile:
        replace_norms(loaded.model, kernels)
    if model.quantize == "none" and not model.compile:
        pack_linears(loaded.model, kernels)
        register()
        try:
            with torch.inference_mode():
                plain_logits(loaded)
        except (AttributeError, TypeError) as error:  # it reads a layer's weight by itself
            reason = f"does not fit this model ({error}): set it to false"
            raise ConfigError("model.cpu_kernels", True, reason) from error
    int8 = _int8_kernel(model, threads) if model.quantize == "int8" else None
    return dataclasses.replace(
        loaded, cpu_kernels=kernels, largest=kernels.largest, int8_kernel=int8
    )


def _int8_kernel(model: ModelConfig, threads: int) -> Int8Kernel | None:
    if model.compile:
        return None  # the compiler knows torch's products and would stop at this one
    try:
        return load_int8_kernel(cache_root(model.cache_dir) / "kernels", threads)
    except (NoCpuKernels, OSError) as error:
        log.warning("int8_kernel_unavailable", reason=str(error), instead="torch's own products")
        return None


def with_layer_calls(loaded: LoadedModel, model: ModelConfig, threads: int) -> LoadedModel:
    """The model with its layers computed by C code, if they are ordinary; its last change."""
    if loaded.cpu_kernels is None or model.compile:
        return loaded
    register()
    layout = Layout(
        loaded.device, cpu_kernels=loaded.cpu_kernels if takes_decodes(loaded) else None
    )
    folder = cache_root(model.cache_dir) / "kernels"
    rounded = loaded.quantize != "none"
    try:
        made = LayerForward(
            loaded.model, loaded.layers, folder, threads, loaded.cpu_kernels.largest
        )
        loaded.model.set_attn_implementation(ATTENTION)
        prove(
            loaded.model,
            loaded.layers,
            layout,
            made.through,
            made.around,
            made.largest,
            rounded=rounded,
        )
    except (NotOrdinary, NoCpuKernels, OSError) as error:
        log.info("layers_run_as_modules", reason=str(error))
        return loaded
    return dataclasses.replace(loaded, by_layers=made, largest=made.largest)


def takes_decodes(loaded: LoadedModel) -> bool:
    """Whether the kernel for decodes takes every layer of the model."""
    heads = loaded.model.config.get_text_config(decoder=True).num_attention_heads
    kernels = loaded.cpu_kernels
    return kernels is not None and all(
        kernels.decodes(spec, heads) for spec in loaded.layers.values()
    )


def decode_recorder(loaded: LoadedModel) -> Recorder:
    """What records decode steps of this model. Raises ``ConfigError``."""
    if loaded.device.type != "cuda":
        reason = f"CUDA graphs need a CUDA device, the model is on {loaded.device}"
        raise ConfigError("model.cuda_graphs", True, reason)
    if any(spec.capped for spec in loaded.layers.values()):
        raise ConfigError("model.cuda_graphs", True, "the model soft-caps its attention scores")
    return CudaRecorder(loaded.device)
