"""Which requests take long to go through, whatever is known of their text."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from gateway.config import RenderConfig
from gateway.decision import ModelProfile
from gateway.prompts import Prompts
from shared.bulk import LARGE_BODY, MANY_ITEMS, is_bulky
from shared.bytetok import byte_bundle
from shared.openai import GenerateRequest, RouteKind, parse
from shared.render import Renderer
from shared.types import WorkerId
from worker.routes_meta import encode_request

USER = {"role": "user", "content": "x"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
MANY = MANY_ITEMS + 1
BULKY: list[dict[str, Any]] = [
    {"messages": [USER] * MANY},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * MANY}]},
    {"messages": [USER], "tools": [TOOL] * MANY},
    {"messages": [{"role": "user", "content": "x" * LARGE_BODY}]},
    {"prompt": ["x"] * 2 * MANY},
    {"prompt": [[97]] * 2 * MANY},
]
SLIGHT: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [USER] * (MANY_ITEMS // 2)},
    {"messages": [{"role": "user", "content": "{" * (LARGE_BODY // 2)}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": None}] * 300},
    {"prompt": "x" * (LARGE_BODY // 2)},
    {"prompt": [97] * (8 * MANY)},
    {"prompt": ["x"] * 20},
]


def read(fields: dict[str, Any]) -> GenerateRequest:
    kind = RouteKind.CHAT if "messages" in fields else RouteKind.COMPLETIONS
    return parse(kind, json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize("fields", BULKY)
def test_many_items_or_bytes_are_bulky(fields: dict[str, Any]) -> None:
    assert is_bulky(read(fields))


@pytest.mark.parametrize("fields", SLIGHT)
def test_usual_requests_are_not(fields: dict[str, Any]) -> None:
    assert not is_bulky(read(fields))


class Spy(Renderer):
    """Notes on which threads it renders, cuts and hashes what is bulky: of a list, prompts are also
    looked at one by one."""

    def __init__(self) -> None:
        super().__init__(byte_bundle())
        self.threads: set[int] = set()

    def _plan(self, request: GenerateRequest) -> Any:
        if is_bulky(request):
            self.threads.add(threading.get_ident())
        return super()._plan(request)


@pytest.mark.parametrize("fields", BULKY)
@pytest.mark.parametrize("salt", ["", "s"])
@pytest.mark.parametrize("known", [False, True])
async def test_the_gateway_reads_them_on_a_thread(
    fields: dict[str, Any], salt: str, known: bool
) -> None:
    profile = ModelProfile("m", "fingerprint", (WorkerId("w"),), 16, 0)
    prompts = Prompts(RenderConfig(), b"k", None)  # type: ignore[arg-type]
    spy = prompts._renderers["fingerprint"] = Spy()
    salted = {**fields, "cache_salt": salt} if salt else fields
    if known:
        await asyncio.to_thread(spy.chain, read(salted), b"root")
        spy.threads.clear()
    prompt = await prompts.read(read(salted), profile)
    await prompts.close()
    assert prompt.n_tokens
    assert spy.threads
    assert threading.get_ident() not in spy.threads


@pytest.mark.parametrize("fields", BULKY)
async def test_a_worker_reads_them_on_a_thread(fields: dict[str, Any]) -> None:
    spy = Spy()
    assert (await encode_request(spy, read(fields))).tokens
    assert threading.get_ident() not in spy.threads
