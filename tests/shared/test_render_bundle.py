"""Tokenizer bundles: reading a model's folder, the wire form, the fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, processors

from shared.bundle import (
    BundleError,
    TokenizerBundle,
    added_ends,
    decode_bundle,
    encode_bundle,
    load_bundle,
)
from shared.bytetok import VOCAB_SIZE, byte_bundle


def folder_of(tmp_path: Path, tokenizer: str | None = None, **files: Any) -> str:
    """A model folder; file names with ``__`` for the dot."""
    text = byte_bundle().tokenizer_json if tokenizer is None else tokenizer
    (tmp_path / "tokenizer.json").write_text(text)
    for name, content in files.items():
        path = tmp_path / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(tmp_path)


def test_a_whole_folder(tmp_path: Path) -> None:
    bundle = load_bundle(
        folder_of(
            tmp_path,
            tokenizer_config__json={
                "bos_token": {"content": "<|im_start|>", "lstrip": False},
                "eos_token": "<|im_end|>",
                "pad_token": None,
                "chat_template": "overruled",
            },
            special_tokens_map__json={"unk_token": {"content": "<|endoftext|>"}, "eos_token": "x"},
            chat_template__jinja="from the file",
            generation_config__json={"eos_token_id": [257, 258], "temperature": 0.6},
        )
    )
    assert bundle.chat_template == "from the file"
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == (
        "<|im_start|>",
        "<|im_end|>",
        False,
    )
    assert bundle.special_tokens == {"unk_token": "<|endoftext|>"}
    assert bundle.eos_token_ids == (257, 258)
    assert bundle.generation == {"temperature": 0.6}
    assert bundle.variables["bos_token"] == "<|im_start|>"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    bundle = load_bundle(folder_of(tmp_path, tokenizer_config__json={"chat_template": named}))
    assert (bundle.chat_template, bundle.tool_template) == ("d", "t")


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    older = {"chat_template": "older"}
    bundle = load_bundle(folder_of(tmp_path, chat_template__json=older))
    assert (bundle.chat_template, bundle.tool_template) == ("older", "t")


def test_eos_of_the_model_s_config_is_the_last_resort(tmp_path: Path) -> None:
    assert load_bundle(folder_of(tmp_path, config__json={"eos_token_id": 7})).eos_token_ids == (7,)
    assert load_bundle(folder_of(tmp_path, config__json={})).eos_token_ids == ()


def adding_bos() -> str:
    tokenizer = Tokenizer.from_str(byte_bundle().tokenizer_json)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 258)]
    )
    return tokenizer.to_str()


@pytest.mark.parametrize(
    ("processed", "explicit", "adds"),
    [
        (True, None, True), (True, False, False), (True, True, True),
        (False, None, False), (False, True, True), (False, False, False),
    ],
)  # fmt: skip
def test_who_decides_about_bos(
    tmp_path: Path, processed: bool, explicit: bool | None, adds: bool
) -> None:
    config: dict[str, Any] = {"bos_token": "<|endoftext|>"}
    if explicit is not None:
        config["add_bos_token"] = explicit
    text = adding_bos() if processed else byte_bundle().tokenizer_json
    bundle = load_bundle(folder_of(tmp_path, text, tokenizer_config__json=config))
    assert bundle.add_bos is adds
    ends = added_ends(Tokenizer.from_str(text), bundle)
    assert [list(end) for end in ends] == [[258] if adds else [], []]


@pytest.mark.parametrize(
    "made",
    [
        processors.Sequence([
            processors.ByteLevel(),
            processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 258)]
            ),
        ]),
        processors.BertProcessing(("<|im_end|>", 257), ("<|endoftext|>", 258)),
        processors.RobertaProcessing(("<|im_end|>", 257), ("<|endoftext|>", 258)),
        processors.ByteLevel(),
        processors.Sequence([processors.ByteLevel()]),
        processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", 257)]),
    ],
)  # fmt: skip
def test_the_post_processor_is_read_as_it_works(tmp_path: Path, made: Any) -> None:
    tokenizer = Tokenizer.from_str(byte_bundle().tokenizer_json)
    tokenizer.post_processor = made
    config = {"bos_token": "<|endoftext|>"}
    bundle = load_bundle(folder_of(tmp_path, tokenizer.to_str(), tokenizer_config__json=config))
    whole = tokenizer.encode("a").ids
    assert bundle.add_bos is (whole[0] == 258)
    before, after = added_ends(tokenizer, bundle)
    assert [*before, 97, *after] == whole


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no tokenizer\.json"):
        load_bundle(str(tmp_path))
    folder = folder_of(tmp_path, tokenizer_config__json="{")
    with pytest.raises(BundleError, match=r"tokenizer_config\.json cannot be read"):
        load_bundle(folder)
    folder = folder_of(tmp_path, tokenizer_config__json="[]")
    with pytest.raises(BundleError, match="no JSON object"):
        load_bundle(folder)
    folder = folder_of(tmp_path, "no json", tokenizer_config__json={})
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        load_bundle(folder)
    for source in ("/no/such/folder", "./x", "nothing", "a/b/c"):
        with pytest.raises(BundleError, match="no directory and no hub id"):
            load_bundle(source)


def test_a_hub_id_that_is_not_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BundleError, match="cannot be fetched from the hub"):
        load_bundle("some-owner/some-model")


def test_the_wire_form_is_reversible() -> None:
    bundle = byte_bundle()
    assert decode_bundle(encode_bundle(bundle)) == bundle
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(bundle), type=TokenizerBundle) == bundle
    with pytest.raises(ValueError, match="not a tokenizer bundle"):
        decode_bundle(b"\xc1")
    with pytest.raises(BundleError):
        decode_bundle(msgspec.msgpack.encode({"tokenizer_json": 5}))


def test_the_fingerprint_covers_what_makes_tokens() -> None:
    bundle = byte_bundle()
    fields = msgspec.structs.asdict(bundle)
    changes = {
        "tokenizer_json": "x", "chat_template": None, "bos_token": "b", "eos_token": "e",
        "add_bos": True, "special_tokens": {"pad_token": "p"}, "tool_template": "t",
    }  # fmt: skip
    prints = {TokenizerBundle(**{**fields, k: v}).fingerprint for k, v in changes.items()}
    assert len(prints | {bundle.fingerprint}) == len(changes) + 1
    same = {**fields, "eos_token_ids": (1,), "generation": {"top_p": 1}}
    assert TokenizerBundle(**same).fingerprint == bundle.fingerprint
    assert decode_bundle(encode_bundle(bundle)).fingerprint == bundle.fingerprint
    assert len(bundle.fingerprint) == 32
    turned = dict(reversed([("a", "1"), ("b", "2")]))
    one = TokenizerBundle("x", special_tokens={"a": "1", "b": "2"})
    assert TokenizerBundle("x", special_tokens=turned).fingerprint == one.fingerprint


def test_the_byte_tokenizer_knows_every_byte() -> None:
    tokenizer = Tokenizer.from_str(byte_bundle().tokenizer_json)
    text = "".join(map(chr, range(1, 0x250))) + "你好🌍\0"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert byte_bundle() == byte_bundle()
