"""``[model] quantize``: the linear layers of a loaded model in int8, checked against the original.

A quantized model keeps its name, so its prompts have the same block keys as the original's. That is
harmless: keys only route, and KV never leaves the worker that computed it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from shared.errors import ConfigError
from worker.model.attention import register
from worker.model.batch import Layout
from worker.model.int8 import check_covered, quantize_linears
from worker.model.selfcheck import check_against_plain, distance, plain_logits
from worker.model.speedups import takes_decodes
from worker.model.support import Unsupported
from worker.model.weights import LoadedModel

_FARTHEST = 0.5
"""Distance of the logits from the original's beyond which int8 is no approximation any more."""


def quantized(loaded: LoadedModel, block_size: int) -> LoadedModel:
    """The same model in int8; its original weights are given up.

    Before that, paged attention is compared with plain attention at full precision, which finds
    smaller errors than a comparison in int8. Raises ``ConfigError`` with the reason if the model
    cannot be quantized, or differs too much from the original afterwards.
    """
    register()
    try:
        check_covered(loaded.model)
        decodes = loaded.cpu_kernels if takes_decodes(loaded) else None
        check_against_plain(loaded, block_size, Layout(loaded.device, cpu_kernels=decodes))
        with torch.inference_mode():
            before = plain_logits(loaded)
            _quantize_in_place(loaded)
            apart = distance(plain_logits(loaded), before)
    except Unsupported as error:
        raise ConfigError("model.quantize", "int8", f"not supported: {error}") from error
    except (AttributeError, TypeError) as error:  # a model that reads a layer's weight by itself
        raise ConfigError("model.quantize", "int8", f"does not fit this model: {error}") from error
    if not apart < _FARTHEST:
        reason = f"logits differ by {apart:.0%} from those of the original weights"
        raise ConfigError("model.quantize", "int8", reason)
    return replace(loaded, quantize="int8")


def _quantize_in_place(loaded: LoadedModel) -> None:
    if loaded.device.type == "cpu":
        quantize_linears(loaded.model, loaded.int8_kernel)
        return
    if find_spec("torchao") is None:
        raise ConfigError(
            "model.quantize", "int8", f"needs the package 'torchao' on {loaded.device}"
        )
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    convert: Any = quantize_
    convert(loaded.model, Int8DynamicActivationInt8WeightConfig())
