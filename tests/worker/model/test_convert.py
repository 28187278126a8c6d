"""GGUF files become folders of safetensors: right, once, and whole or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.errors import ConfigError
from worker.model import convert as conversion
from worker.model.convert import MARKER, convert, converted_folder, is_converted
from worker.model.weights import load_model

pytestmark = pytest.mark.torch


def write_gguf(path: Path, model: Any) -> Tokenizer:
    """``model``, a llama, as the usual converters write it; returns its tokenizer."""
    alphabet = ["Ġ", *sorted(pre_tokenizers.ByteLevel.alphabet())[:126]]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ĠĠ"]
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("mit")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 128)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for part, n in heads.items():
            if part in name:  # llama.cpp keeps the two halves of a head interleaved
                rows, columns = array.shape
                array = array.reshape(n, 2, rows // n // 2, columns).swapaxes(1, 2)
                array = array.reshape(rows, columns)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected_tokenizer(tokens)


def expected_tokenizer(tokens: list[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    return tokenizer


def test_a_gguf_file_is_converted_once(
    tmp_path: Path, config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    model = model_of(config_of_kind("llama"), torch.float32)
    tokenizer = write_gguf(tmp_path / "Tiny.gguf", model)
    news: list[str] = []
    cache = tmp_path / "cache"
    loaded = load_model(str(tmp_path / "Tiny.gguf"), cache_dir=str(cache), progress=news.append)
    assert len(news) == 2
    assert loaded.name == "Tiny"
    assert loaded.eos_token_ids == {2}
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded.model(ids).logits)
    stored = Tokenizer.from_file(f"{loaded.source}/tokenizer.json")
    for text in ("a  5", "x   12<|im_end|>!", "7"):
        assert stored.encode(text).ids == tokenizer.encode(text).ids
    assert 'licence":"mit"' in (Path(loaded.source) / MARKER).read_text()

    before = Path(loaded.source).stat().st_mtime_ns
    again = load_model(str(tmp_path / "Tiny.gguf"), cache_dir=str(cache), progress=news.append)
    assert again.source == loaded.source
    assert Path(loaded.source).stat().st_mtime_ns == before
    assert len(news) == 2


def test_what_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match="cannot convert"):
        load_model(str(tmp_path / "bad.gguf"), cache_dir=str(tmp_path / "cache"))
    assert [p.suffix for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]
    (tmp_path / "text.gguf").write_bytes(b"text")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        load_model(str(tmp_path / "text.gguf"))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        load_model(str(tmp_path / "model.bin"))


def fake_write(calls: list[str], delay: float = 0.0) -> Callable[[Path, str, Path], None]:
    def write(gguf_file: Path, sha256: str, folder: Path) -> None:
        calls.append(sha256)
        time.sleep(delay)
        origin = conversion.Origin(conversion.FORMAT, gguf_file.stem, sha256, None)
        (folder / MARKER).write_bytes(msgspec.json.encode(origin))

    return write


def test_workers_that_start_together_convert_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(conversion, "_write", fake_write(calls, delay=0.1))
    done: list[Path] = []

    def start() -> None:
        done.append(convert(Path("m.gguf"), "abc", tmp_path, lambda _: None))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["abc"]
    assert set(done) == {converted_folder(tmp_path, "abc")}


def test_half_a_conversion_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted_folder(tmp_path, "abc")
    scratch = folder.with_name(".abc.partial")
    scratch.mkdir(parents=True)
    (scratch / "model.safetensors").write_text("half")
    folder.mkdir()
    (folder / MARKER).write_text('{"format":0,"name":"m","sha256":"abc","licence":null}')
    assert not is_converted(folder)
    calls: list[str] = []
    monkeypatch.setattr(conversion, "_write", fake_write(calls))
    convert(Path("m.gguf"), "abc", tmp_path, lambda _: None)
    assert calls == ["abc"]
    assert is_converted(folder)
    assert [p.name for p in folder.iterdir()] == [MARKER]
    assert not scratch.exists()
