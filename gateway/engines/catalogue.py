"""All adapters by name, and the question which of them an address is."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.engines.base import Answers, Engine
from gateway.engines.llamacpp import LlamaCpp
from gateway.engines.native import Native
from gateway.engines.openai import OpenAIServer
from gateway.engines.sglang import Sglang
from gateway.engines.tgi import TextGenerationInference
from gateway.engines.vllm import Vllm

AUTO = "auto"
_FOREIGN: tuple[Engine, ...] = (Vllm(), Sglang(), LlamaCpp(), TextGenerationInference())
_PLAIN: Engine = OpenAIServer()
ENGINES: Mapping[str, Engine] = {e.name: e for e in (Native(), *_FOREIGN, _PLAIN)}
ASKS: tuple[str, ...] = tuple(dict.fromkeys(path for engine in _FOREIGN for path in engine.asks))
"""Paths whose answers tell the engines apart."""


def engine(name: str) -> Engine:
    """An adapter by name; any other name is an OpenAI server."""
    return ENGINES.get(name, _PLAIN)


def detect(answers: Answers) -> Engine:
    """The engine that gave these answers; an OpenAI server if none is recognised."""
    return next((one for one in _FOREIGN if one.recognises(answers)), _PLAIN)
