"""Sampling fields that a request leaves out: the model's own, then OpenAI's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.openai import RouteKind, parse
from worker.defaults import OPENAI, SamplingDefaults, read_defaults
from worker.requests import Limits, read_ask
from worker.sequence import SamplingParams

LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}


def folder(place: Path, content: Any) -> str:
    """A model's folder."""
    (place / "generation_config.json").write_text(json.dumps(content))
    return str(place)


def params(
    defaults: SamplingDefaults, kind: RouteKind = RouteKind.CHAT, **fields: Any
) -> SamplingParams:
    """Of a request with these fields."""
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
    limits = Limits(300, 100, defaults)
    return read_ask(parse(kind, json.dumps(body).encode()), limits).params


def test_what_the_file_says(tmp_path: Path) -> None:
    assert read_defaults(folder(tmp_path, LLAMA)) == SamplingDefaults(temperature=0.6, top_p=0.9)
    every = {"temperature": 0, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05}
    assert read_defaults(folder(tmp_path, every)) == SamplingDefaults(0.0, 0.8, 20, 0.05, 1.05)
    off = {"temperature": None, "top_k": -1, "max_new_tokens": 5}
    assert read_defaults(folder(tmp_path, off)) == OPENAI


def test_no_file_is_openais_defaults(tmp_path: Path) -> None:
    assert read_defaults(str(tmp_path)) == read_defaults("") == OPENAI == SamplingDefaults()


@pytest.mark.parametrize("wrong", [{"temperature": 3}, {"top_p": 0}, {"top_k": "x"}, [1]])
def test_a_file_that_cannot_be_meant_names_itself(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.generation_config.*generation_config\.json"):
        read_defaults(folder(tmp_path, wrong))


@pytest.mark.parametrize("kind", list(RouteKind))
def test_a_request_that_names_a_field_has_its_own_value(kind: RouteKind) -> None:
    usual = SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1)
    left_out = params(usual, kind, top_k=None)
    assert left_out.temperature == 0.6
    assert (left_out.top_p, left_out.top_k, left_out.min_p) == (0.9, 20, 0.05)
    assert left_out.repetition_penalty == 1.1
    named = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert params(usual, kind, **named) == params(OPENAI, kind)
    assert params(usual, kind, top_k=-1).top_k == 0
    assert params(usual, kind, top_p=0).top_k == 1


@pytest.mark.torch
@pytest.mark.parametrize(("setting", "expected"), [("auto", 0.6), ("none", 1.0)])
def test_a_loaded_model(tmp_path: Path, setting: Any, expected: float) -> None:
    from casemodel import byte_model

    from worker.build import load_model
    from worker.config import CacheConfig, ModelConfig, WorkerConfig

    path = byte_model(tmp_path / "bytes")
    folder(path, LLAMA | {"eos_token_id": 257})
    model = ModelConfig(path=str(path), device="cpu", threads=1, generation_config=setting)
    made = load_model(WorkerConfig(model=model, cache=CacheConfig(kv_blocks=4)))
    assert made.defaults.temperature == expected
    made.runner.close()
