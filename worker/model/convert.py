"""GGUF to a folder of safetensors and tokenizer files, once per file content."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.errors import ConfigError
from worker.model.fetch import Progress, exclusive

FORMAT = 1
"""Grows when the conversion changes, so that older results are made anew."""
MARKER = "headwater.json"


class Origin(msgspec.Struct, frozen=True):
    """What a converted folder was made from; written last into ``headwater.json``."""

    format: int
    name: str
    sha256: str
    licence: str | None


def is_converted(folder: Path) -> bool:
    """Whether ``folder`` is a whole result of this version of the conversion."""
    try:
        origin = msgspec.json.decode((folder / MARKER).read_bytes(), type=Origin)
    except (OSError, msgspec.DecodeError, RecursionError):
        return False
    return origin.format == FORMAT


def converted_folder(root: Path, sha256: str) -> Path:
    """Where the result for a GGUF file with this digest lies."""
    return root / "models" / sha256


def lock_path(root: Path, sha256: str) -> Path:
    """File lock that whoever converts this file holds."""
    return root / "models" / f"{sha256}.lock"


def convert(gguf: Path, sha256: str, root: Path, progress: Progress) -> Path:
    """Folder for ``gguf``, made if need be; concurrent callers wait for the first.

    The folder appears whole or not at all. Raises ``ConfigError`` if the file cannot be read.
    """
    folder = converted_folder(root, sha256)
    if is_converted(folder):
        return folder
    with exclusive(lock_path(root, sha256)):
        return convert_locked(gguf, sha256, root, progress)


def convert_locked(gguf: Path, sha256: str, root: Path, progress: Progress) -> Path:
    """As :func:`convert`, for a caller that holds :func:`lock_path`."""
    folder = converted_folder(root, sha256)
    if is_converted(folder):
        return folder
    progress(f"converting {gguf.name} to float32 safetensors in {folder} (once, under a minute)")
    scratch = folder.with_name(f".{sha256}.partial")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a holder of the lock that was killed
    scratch.mkdir(parents=True)
    try:
        _write(gguf, sha256, scratch)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise ConfigError("model.path", str(gguf), f"cannot convert: {error}") from error
    if folder.exists():
        shutil.rmtree(folder)  # of an older conversion
    scratch.rename(folder)
    progress(f"converted {gguf.name}")
    return folder


def _write(gguf: Path, sha256: str, folder: Path) -> None:
    facts = GGUFReader(gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _restore_digits(tokenizer.backend_tokenizer, _text(facts, "tokenizer.ggml.pre"))
    tokenizer.save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # Everything is dequantised by now, but the model is still marked as quantised, and such a
    # model refuses to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    origin = Origin(FORMAT, gguf.stem, sha256, _text(facts, "general.license"))
    (folder / MARKER).write_bytes(msgspec.json.encode(origin))


def _restore_digits(tokenizer: Tokenizer, kind: str | None) -> None:
    """Put back the digit splitting that the GGUF names and the rebuilt tokenizer lost.

    It shows where whitespace precedes a digit ("a  5"): the split decides how spaces group.
    """
    if kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )


def _text(facts: GGUFReader, key: str) -> str | None:
    field = facts.get_field(key)
    return None if field is None else str(field.contents())
