"""A LoRA adapter's folder in PEFT's form: read, fingerprinted, and refused if it asks for more.

    adapter_config.json          what it is: rank, scale, which modules
    adapter_model.safetensors    ``base_model.model.MODULE.lora_A.weight`` and ``lora_B.weight``

A setting that would change answers and is not known here is refused by name, never skipped: half an
adapter answers wrongly without an error. No torch: the weights stay bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import HeadwaterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 4 << 20
REVISION_CHARS = 32

_WITHOUT_EFFECT = frozenset(
    "task_type revision inference_mode peft_version auto_mapping lora_dropout loftq_config "
    "eva_config corda_config lora_ga_config megatron_core qalora_group_size runtime_config "
    "ensure_weight_tying fan_in_fan_out".split()
)
"""Fields that concern training or the form of the base weights, not what is added to them."""
_OWN_START = ("", "true", "false", "gaussian", "eva", "orthogonal", "lora_ga")
"""Ways to begin training that leave the base weights alone."""


class AdapterRefused(HeadwaterError):
    """Why an adapter cannot be served right."""


class AdapterMissing(AdapterRefused):
    """There is no such folder."""


class LoraSpec(msgspec.Struct, frozen=True):
    """The fields of ``adapter_config.json`` that decide what is added."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str = True
    base_model_name_or_path: str | None = None

    def targets(self, names: Iterable[str], head: str | None) -> set[str]:
        """Those of a model's linear modules that the adapter says it changes.

        :param head: the output layer, which ``all-linear`` leaves out.
        """
        if self.target_modules == "all-linear":
            return {name for name in names if name != head and not self._excludes(name)}
        return {name for name in names if self._includes(name) and not self._excludes(name)}

    def rank(self, module: str) -> int:
        """Its rank at a module."""
        key = _pattern_of(self.rank_pattern, module)
        return self.r if key is None else (self.rank_pattern or {})[key]

    def scale(self, module: str) -> float:
        """What its product is multiplied by at a module."""
        key = _pattern_of(self.alpha_pattern, module)
        alpha = self.lora_alpha if key is None else (self.alpha_pattern or {})[key]
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.r, *(self.rank_pattern or {}).values(), 0)

    def _includes(self, name: str) -> bool:
        wanted = self.target_modules
        if isinstance(wanted, str):
            return re.fullmatch(wanted, name) is not None
        if wanted is None or name in wanted:
            return wanted is not None
        return any(name.endswith(f".{target}") for target in wanted) and self._in_layers(name)

    def _excludes(self, name: str) -> bool:
        excluded = self.exclude_modules
        if not excluded:
            return False
        if isinstance(excluded, str):
            return re.fullmatch(excluded, name) is not None
        return name in excluded or any(name.endswith(f".{part}") for part in excluded)

    def _in_layers(self, name: str) -> bool:
        layers = self.layers_to_transform
        if layers is None or layers == []:
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name)
            if found is not None:
                return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
        return False


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """One adapter's folder, read once: what is hashed is what is used."""

    spec: LoraSpec
    weights: bytes
    """A safetensors file."""
    revision: str
    """Digest of both files: 32 hex digits."""


def read_folder(folder: str, max_rank: int) -> AdapterFiles:
    """Read an adapter. Slow; any thread. Raises :class:`AdapterRefused` with the reason."""
    place = Path(folder)
    if not place.is_dir():
        raise AdapterMissing("there is no such folder")
    config = _bytes_of(place, CONFIG, MAX_CONFIG_BYTES)
    if not (place / WEIGHTS).exists() and (place / "adapter_model.bin").exists():
        raise AdapterRefused(f"its weights are a pickle: only {WEIGHTS} is read")
    weights = _bytes_of(place, WEIGHTS, None)
    spec = read_config(config)
    if spec.max_rank() > max_rank:
        raise AdapterRefused(f"rank {spec.max_rank()} is over max_lora_rank, {max_rank}")
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    digest.update(weights)
    return AdapterFiles(spec, weights, digest.hexdigest()[:REVISION_CHARS])


def read_config(data: bytes) -> LoraSpec:
    """Check ``adapter_config.json``. Raises :class:`AdapterRefused`."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        if (kind := fields.get("peft_type")) != "LORA":
            raise AdapterRefused(f"adapters of type {kind!r} are not supported, only LORA")
        _refuse_extras(fields)
        spec = msgspec.convert(
            {name: value for name, value in fields.items() if value is not None}, LoraSpec
        )
    except (msgspec.DecodeError, RecursionError) as error:  # validation errors among them
        raise AdapterRefused(f"{CONFIG} cannot be read: {error}") from None
    _check(spec)
    return spec


def _refuse_extras(fields: dict[str, Any]) -> None:
    known = _WITHOUT_EFFECT.union(LoraSpec.__struct_fields__)
    for name, value in fields.items():
        if value and name not in known:
            raise AdapterRefused(f"it uses {name!r}, which is not supported")


def _check(spec: LoraSpec) -> None:
    if spec.bias != "none":
        raise AdapterRefused(f"it trains biases (bias={spec.bias!r}), which is not supported")
    start = str(spec.init_lora_weights).lower()
    if start not in _OWN_START:
        raise AdapterRefused(
            f"it began as {start!r}, which changes the base weights: convert it to plain LoRA"
        )
    if not spec.target_modules:
        raise AdapterRefused("it names no target_modules")
    if min(spec.r, *(spec.rank_pattern or {}).values(), spec.r) < 1:
        raise AdapterRefused("a rank is below 1")
    for pattern in _patterns(spec):
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterRefused(f"{pattern!r} is no pattern: {error}") from None


def _patterns(spec: LoraSpec) -> list[str]:
    single = (spec.target_modules, spec.exclude_modules)
    layers = spec.layers_pattern or []
    return [
        *(pattern for pattern in single if isinstance(pattern, str)),
        *([layers] if isinstance(layers, str) else layers),
        *(spec.rank_pattern or {}),
        *(spec.alpha_pattern or {}),
    ]


def _pattern_of(patterns: dict[str, Any] | None, module: str) -> str | None:
    """First of the patterns that ends a module's name."""
    for pattern in patterns or {}:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return None


def _bytes_of(folder: Path, name: str, limit: int | None) -> bytes:
    path = folder / name
    if not path.is_file():  # also what is no plain file, such as a device
        raise AdapterRefused(f"{name} is missing")
    try:
        if limit is not None and path.stat().st_size > limit:
            raise AdapterRefused(f"{name} is larger than {limit} bytes")
        return path.read_bytes()
    except OSError as error:
        raise AdapterRefused(f"{name} cannot be read: {error.strerror}") from None
