"""A model and its facts from a folder, a hub id, a GGUF file or the name of the default model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from shared.errors import ConfigError
from worker.model.batch import StepBatch
from worker.model.compiled import CompiledForward
from worker.model.convert import convert, convert_locked, converted_folder, is_converted, lock_path
from worker.model.cpu_int8 import Int8Kernel
from worker.model.cpu_kernels import CpuKernels
from worker.model.cpu_native import Largest
from worker.model.fetch import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_NAME,
    DEFAULT_SHA256,
    Progress,
    cache_root,
    default_gguf,
    exclusive,
    hub_snapshot,
    local_place,
    sha256_of,
)
from worker.model.kvcache import LayerSpec
from worker.model.support import Unsupported, check_config, inspect_layers

if TYPE_CHECKING:  # PretrainedConfig before version 5
    from transformers import PreTrainedConfig

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checked model on its device, and what the engine must know of it."""

    model: PreTrainedModel
    layers: Mapping[nn.Module, LayerSpec]
    """What each attention module keeps per token."""
    source: str
    """Folder with the tokenizer files, for ``shared.bundle.load_bundle``; empty if without."""
    name: str
    """Name it is served under unless told otherwise."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    quantize: str = "none"
    """How its linear layers are held; see ``worker.model.quantize``."""
    cpu_kernels: CpuKernels | None = None
    """The worker's own kernels, if this model uses them."""
    int8_kernel: Int8Kernel | None = None
    """Multiplies once the model is quantized."""
    compiled: CompiledForward | None = None
    """Runs in place of the model's own code if set."""
    by_layers: Callable[[StepBatch], Tensor] | None = None
    """As ``compiled``, for steps that no kernel serves as a whole (``cpu_layer.py``)."""
    largest: Callable[[Tensor], Largest] | None = None
    """Finds the largest of each row of logits; None = as torch does."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def forward(
        self, batch: StepBatch, rows: Tensor | None = None, *, changed: bool = False
    ) -> Tensor:
        """Logits ``[S, V]`` of the sampled rows of one packed step, or of ``rows``; writes KV.

        ``changed``: modules of the model do something else in this step, unknown to a compiled one.
        """
        with torch.inference_mode():
            if self.compiled is not None and rows is None and not changed:
                return self.compiled(batch)
            if self.by_layers is not None and rows is None and not changed and not batch.kernel:
                return self.by_layers(batch)
            out = self.model(
                input_ids=batch.ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.sampled_rows if rows is None else rows,
                paged=batch,
            )
        logits: Tensor = out.logits[0]
        return logits

    @contextmanager
    def layers_run_once(self) -> Iterator[None]:
        """Within it only the first forward computes the layers, the others their head alone: for
        more rows of the same batch. What a model does to its logits afterwards stays in place.
        """
        model: Any = self.model
        decoder = model.get_decoder()
        if decoder is model:  # no part of it is known to be the layers alone
            yield
            return
        compute: Callable[..., Any] = decoder.forward
        kept: list[Any] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not kept:
                kept.append(compute(*args, **kwargs))
            return kept[0]

        decoder.forward = forward
        try:
            yield
        finally:
            decoder.forward = compute


def load_model(
    path: str,
    device: str = "auto",
    dtype: str = "auto",
    *,
    cache_dir: str = "",
    max_model_len: int = 0,
    progress: Progress = lambda _: None,
) -> LoadedModel:
    """Load and check a model. ``progress`` is told in one line about anything that takes long.

    ``pack``: on a CPU, keep weights in the layout that multiplies fastest.
    Raises ``ConfigError`` if it cannot be had, is not supported (with the reason), or a setting
    does not fit it.
    """
    _quiet_progress_bars()
    folder, name = locate_model(path, cache_dir, progress)
    where = pick_device(device)
    what = pick_dtype(dtype, where)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_config(config)
        model = _read_weights(folder, config, what)
        return describe(model.to(where), source=str(folder), name=name, max_model_len=max_model_len)
    except Unsupported as error:
        raise ConfigError("model.path", path, f"not supported: {error}") from error
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError("model.path", path, str(error).strip().splitlines()[0]) from error


def _quiet_progress_bars() -> None:
    """They would write over the worker's own lines on stderr."""
    quiet: Callable[[], None] = transformers.utils.logging.disable_progress_bar
    quiet()


def describe(
    model: PreTrainedModel, *, source: str = "", name: str = "model", max_model_len: int = 0
) -> LoadedModel:
    """Check a model in memory and gather its facts. Raises ``Unsupported`` or ``ConfigError``."""
    model.train(False)
    check_config(model.config)
    text = model.config.get_text_config(decoder=True)
    head: Any = model.get_output_embeddings
    longest = _length_limit(text, max_model_len)
    return LoadedModel(
        model=model,
        layers=inspect_layers(model, longest),
        source=source,
        name=name,
        max_model_len=longest,
        vocab_size=head().weight.shape[0],
        eos_token_ids=_eos_ids(model.generation_config, text),
    )


def locate_model(path: str, cache_dir: str, progress: Progress) -> tuple[Path, str]:
    """Folder of safetensors and tokenizer files, and the model's name."""
    root = cache_root(cache_dir)
    if path == DEFAULT_MODEL:
        return _default_folder(root, progress), DEFAULT_MODEL_NAME
    place = local_place(path)
    if place is None:
        return hub_snapshot(path, progress), path
    if place.is_dir():
        return place, place.resolve().name
    return convert(place.resolve(), sha256_of(place), root, progress), place.stem


def _default_folder(root: Path, progress: Progress) -> Path:
    folder = converted_folder(root, DEFAULT_SHA256)
    if is_converted(folder):
        return folder
    # the lock comes before fetching, so that workers that start together fetch once
    with exclusive(lock_path(root, DEFAULT_SHA256)):
        if is_converted(folder):
            return folder
        with default_gguf(root, progress) as gguf:
            return convert_locked(gguf, DEFAULT_SHA256, root, progress)


def pick_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("model.device", device, "no such device") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            "model.device", device, f"{torch.cuda.device_count()} CUDA devices are visible"
        )
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError("model.device", device, "auto, cpu or cuda:N")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU (bfloat16 halves its prefill speed) and bfloat16 on CUDA."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[dtype]


def _read_weights(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    read: Any = AutoModelForCausalLM.from_pretrained
    model, report = read(
        folder,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would leave them random
        raise ValueError(f"{len(missing)} weights are missing, first {missing[0]}")
    return model


def _length_limit(text: PreTrainedConfig, wanted: int) -> int:
    """Longest sequence the model is right for, or ``wanted`` if that is shorter."""
    limit = getattr(text, "max_position_embeddings", None)
    reason = "the model's own limit"
    for rope in _rope_settings(text):
        if rope.get("rope_type") == "longrope":
            # beyond it all positions rotate otherwise, so KV kept from before would be wrong
            limit = min(limit or sys.maxsize, rope["original_max_position_embeddings"])
            reason = "the length up to which this model's rotary frequencies stay the same"
    if limit is None:
        if not wanted:
            raise ConfigError("model.max_model_len", wanted, "the model names no limit: set one")
        return wanted
    if wanted > limit:
        raise ConfigError("model.max_model_len", wanted, f"over {limit}, {reason}")
    return wanted or int(limit)


def _rope_settings(text: PreTrainedConfig) -> list[Mapping[str, Any]]:
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _eos_ids(generation: GenerationConfig | None, text: PreTrainedConfig) -> frozenset[int]:
    found: set[int] = set()
    for holder in (generation, text):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset(found)
