"""B07: only what a prompt begins with counts as a match; a hole ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cachestub import Engine, post, words
from caserig import COMPLETIONS, body_for
from conftest import pick_port
from integration.feeds.conftest import StandIn
from rig import CHAT, ask, eventually

from shared.blocks import Scope, chain_keys
from shared.bundle import load_bundle
from shared.bytetok import byte_bundle
from shared.load import WorkerInfo
from shared.settings import DeploymentConfig

BLOCK = 16


async def matched(served: Any, path: str, text: str, **more: Any) -> dict[str, int]:
    """What each worker is believed to hold of a prompt."""
    answer = await ask(served.admin, "/admin/explain", body_for(path, text, **more))
    assert answer.status == 200, answer.body
    return {each["id"]: each["matched_tokens"] for each in answer.json["workers"]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("size", [100, 512])
async def test_a_prompt_goes_to_its_beginning(stub, serve, path: str, size: int) -> None:
    workers = [await stub(), await stub()]
    for each in workers:
        Engine(each, service_s=0.0)
    served = await serve(*workers)
    for seed in range(20):
        x, y = words(size, seed), words(size, 1000 + seed)
        at_x, at_y = await post(served.url, x, path), await post(served.url, y, path)
        if at_x != at_y:
            break
    for first, second, home in ((y, x, at_y), (x, y, at_x)):
        known = await matched(served, path, first + second)
        other = at_x if home == at_y else at_y
        assert size - 2 * BLOCK <= known[home] <= size + BLOCK
        assert known[other] == 0
        assert await post(served.url, first + second + " and more", path) == home
    swapped = "".join(x[at : at + 64] for at in range(64, len(x) - 63, 64)) + x[:64]
    assert set((await matched(served, path, swapped)).values()) == {0}
    shifted = await matched(served, path, " " + x)
    assert set(shifted.values()) == {0}
    without = await matched(served, path, x[64:])
    assert set(without.values()) == {0}


class Feeding(StandIn):
    """A worker whose cache events the test makes up, with a tokenizer of bytes."""

    tokenizer = ""

    @property
    def info(self) -> WorkerInfo:
        """As it presents itself."""
        return msgspec.structs.replace(super().info, tokenizer=self.tokenizer)


@pytest.fixture
async def feeding(serve: Any, tmp_path: Path) -> AsyncIterator[tuple[Any, StandIn]]:
    """A gateway that knows the tokenizer, and the worker."""
    (tmp_path / "tokenizer.json").write_text(byte_bundle().tokenizer_json)
    one = Feeding(pick_port())
    one.tokenizer = load_bundle(str(tmp_path)).fingerprint
    await one.listen()
    served = await serve(**{"workers.urls": one.url, "render.tokenizers": {"m": str(tmp_path)}})
    yield served, one
    await one.hang_up()


@pytest.mark.parametrize("gone", [0, 1, 3, 7])
async def test_a_hole_ends_the_match(feeding: tuple[Any, StandIn], gone: int) -> None:
    served, one = feeding
    text = "".join(f"{n:015} " for n in range(8)) * 4
    root = Scope("m", one.info.tokenizer).root(DeploymentConfig().hash_key)
    keys = chain_keys(root, list(text.encode()[: 8 * BLOCK]))
    await eventually(lambda: _exact(served))
    await one.store(*map(int, keys))

    async def believed(tokens: int) -> None:
        async with asyncio.timeout(5):
            while True:
                known = await matched(served, COMPLETIONS, text + "!")
                if list(known.values()) == [tokens]:
                    return
                await asyncio.sleep(0.02)

    await believed(8 * BLOCK)
    await one.evict(int(keys[gone]))
    await believed(gone * BLOCK)
    await one.store(int(keys[gone]))
    await believed(8 * BLOCK)


def _exact(served: Any) -> bool:
    now = asyncio.get_running_loop().time()
    return [str(w.trust) for w in served.gateway.router.workers(now)] == ["exact"]
