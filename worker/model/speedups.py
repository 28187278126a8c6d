"""Settings that make steps faster where they work, and are refused with the reason elsewhere."""

from __future__ import annotations

import dataclasses

from shared.errors import ConfigError
from worker.model.compiled import CompiledForward
from worker.model.fetch import Progress
from worker.model.recorded import CudaRecorder, Recorder
from worker.model.weights import LoadedModel


def compile_model(
    loaded: LoadedModel, progress: Progress, backend: str = "inductor"
) -> LoadedModel:
    """The model with its forward compiled for every kind of step. Raises ``ConfigError``."""
    progress("compiling the model (model.compile), which takes minutes")
    forward = CompiledForward(loaded.model, loaded.layers, backend)
    try:
        forward.warm_up(loaded.layers, loaded.device, loaded.least_rows)
    except (RuntimeError, ImportError, TypeError) as error:
        reason = f"torch.compile fails on this model: {str(error).strip().splitlines()[0]}"
        raise ConfigError("model.compile", True, reason) from error
    return dataclasses.replace(loaded, compiled=forward)


def decode_recorder(loaded: LoadedModel) -> Recorder:
    """What records decode steps of this model. Raises ``ConfigError``."""
    if loaded.device.type != "cuda":
        reason = f"CUDA graphs need a CUDA device, the model is on {loaded.device}"
        raise ConfigError("model.cuda_graphs", True, reason)
    if any(spec.capped for spec in loaded.layers.values()):
        raise ConfigError("model.cuda_graphs", True, "the model soft-caps its attention scores")
    return CudaRecorder(loaded.device)
