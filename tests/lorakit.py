"""LoRA adapters made on the spot: folders in PEFT's form, without PEFT."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def write_fake(folder: Path, content: str = "weights", **config: Any) -> Path:
    """A folder that the worker without torch takes: of the weights only the digest counts."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(content))
    return folder


def _safetensors(content: str) -> bytes:
    header = json.dumps({"__metadata__": {"content": content}}).encode()
    return struct.pack("<Q", len(header)) + header
