"""What the routes remember of one tenant's requests must not be found by another one's."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from shared.openai import RouteKind, parse
from shared.render import Renderer, byte_bundle
from worker.config import WorkerConfig
from worker.defaults import OPENAI
from worker.generation import GenerationRequest
from worker.grammar import GrammarCompiler
from worker.requests import Limits, read_ask
from worker.routes_generate import _in_form
from worker.routes_meta import MetaRoutes
from worker.sequence import SamplingParams
from worker.service import Service

TEXT = "the launch codes are in the blue folder " * 20
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize("asked", [{"prompt": TEXT}, {"messages": MESSAGES}], ids=["text", "chat"])
async def test_tokenize_remembers_nothing(asked: dict[str, Any]) -> None:
    """Nor does it find what generation remembers: it is asked without a salt."""
    renderer = Renderer(byte_bundle())
    service = Service(WorkerConfig(), ("m",), clock=time.monotonic, wall=time.time)
    loaded: Any = SimpleNamespace(
        renderer=renderer,
        info=SimpleNamespace(max_model_len=4096),
    )
    service._loaded = loaded
    app = web.Application()
    MetaRoutes(service, 1 << 20).add_to(app)
    before = renderer.stats().cache
    async with TestClient(TestServer(app)) as http:
        for _ in range(2):
            answer = await (await http.post("/tokenize", json=asked)).json()
            assert answer["count"] > len(TEXT) - 1
    assert renderer.stats().cache == before


async def test_a_form_belongs_to_its_salt() -> None:
    pytest.importorskip("llguidance")
    compiler = GrammarCompiler(byte_bundle().tokenizer_json, 259, (257,))
    loaded: Any = SimpleNamespace(grammars=compiler)
    plain = GenerationRequest("a", (1,), SamplingParams(max_tokens=1), b"r" * 16)
    made = []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        fields = {"messages": MESSAGES, "guided_regex": "x+", **salt}
        call = parse(RouteKind.CHAT, json.dumps(fields).encode())
        ask = read_ask(call, Limits(300, 4096, OPENAI))
        (formed,) = await _in_form(ask, loaded, (plain,))
        made.append(formed.grammar)
    assert len({id(each) for each in made}) == 3
