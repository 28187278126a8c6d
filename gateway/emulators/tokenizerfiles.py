"""A tokenizer bundle as the files that ``[render] tokenizers`` reads."""

from __future__ import annotations

import json
from pathlib import Path

from shared.bundle import TokenizerBundle


def write_tokenizer(bundle: TokenizerBundle, folder: Path) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; returns the folder.

    :raises OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(bundle.tokenizer_json, encoding="utf-8")
    config = {
        "chat_template": bundle.chat_template,
        "bos_token": bundle.bos_token,
        "eos_token": bundle.eos_token,
        "add_bos_token": bundle.add_bos,
        **bundle.special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
