"""What a model's own ``generation_config.json`` says about sampling.

It holds for requests that leave a field out, as in vLLM. ``do_sample`` is not looked at there, and
so it is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from shared.errors import ConfigError

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of fields that a request leaves out; those of OpenAI unless a model says otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


OPENAI = SamplingDefaults()
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Given(msgspec.Struct):
    """The fields that are looked at, with the ranges that requests have."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None


def read_defaults(folder: str) -> SamplingDefaults:
    """Those of the model in a folder; OpenAI's without such a file.

    Raises ``ConfigError`` if the file cannot be read or a value is out of range.
    """
    path = Path(folder) / FILE
    if not folder or not path.is_file():
        return OPENAI
    try:
        given = msgspec.json.decode(path.read_bytes(), type=_Given)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        reason = f"{path}: {error}; 'none' leaves the file out"
        raise ConfigError("model.generation_config", "auto", reason) from error
    found = {
        name: value for name, value in msgspec.structs.asdict(given).items() if value is not None
    }
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    return SamplingDefaults(**found)
