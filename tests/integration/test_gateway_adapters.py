"""A gateway before workers that load and unload adapters: predicted is delivered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from lorakit import write_fake
from redisload import await_in_step
from rig import CHAT, Reply, ask, chat, completion, eventually
from stopwatch import Stopwatch

from gateway.refusals import MODEL_GONE
from shared.errors import ModelNotFound
from shared.openai import error_body

LONG = "The adapters of one model share its weights and nothing of its cache. " * 4
HEALTH_S = 0.3
MODELLED = {"HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "100"}
"""30 ms a prompt: what a busy machine adds must not look like one worker being the slower one."""


async def load(worker: Any, name: str, folder: Path, **more: Any) -> None:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    reply = await ask(worker.admin_url, "/v1/load_lora_adapter", body)
    assert reply.status == 200, reply.body


async def unload(worker: Any, name: str) -> None:
    reply = await ask(worker.admin_url, "/v1/unload_lora_adapter", {"lora_name": name})
    assert reply.status == 200, reply.body


async def turn(served: Any, model: str, text: str, **more: Any) -> Reply:
    return await ask(served.url, CHAT, chat(text, model=model, max_tokens=8, **more))


def predicted(reply: Reply) -> int:
    return int(reply.header("x-headwater-matched-tokens") or -1)


def delivered(reply: Reply) -> int:
    cached: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def listed(served: Any) -> dict[str, Any]:
    reply = await ask(served.url, "/v1/models")
    return {card["id"]: card for card in reply.json["data"]}


async def exact(served: Any, n_workers: int) -> None:
    """All workers are there, their events flow, and the tokenizer is loaded."""
    gateway = served.gateway
    await eventually(
        lambda: (
            [w.trust for w in gateway.router.workers(0.0) if not w.reason] == ["exact"] * n_workers
        ),
        20,
    )
    profile = gateway.router.profile("fake")
    await eventually(lambda: gateway.prompts.missing(profile) is None, 20)


@pytest.fixture(params=["http", "redis"])
def road(request: pytest.FixtureRequest) -> str:
    """How workers tell the gateway who they are and what they hold: the Redis URL, or none."""
    if request.param == "http":
        return "none"
    server = request.getfixturevalue("redis_server_factory")("newest")
    return str(server.url)


@pytest.mark.redis
async def test_predicted_is_delivered_after_load_reload_and_unload(
    worker_process: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path, road: str
) -> None:
    flags = ["--redis", road] if road != "none" else []
    has, lacks = worker_process(*flags, env=MODELLED), worker_process(*flags, env=MODELLED)
    by_id = {one.url.removeprefix("http://"): one for one in (has, lacks)}
    served = await serve(
        **{
            "workers.urls": f"{has.url},{lacks.url}",
            "workers.health_interval_s": HEALTH_S,
            "redis.url": road,
        },
        wait=False,
    )
    await exact(served, 2)
    folder = write_fake(tmp_path / "x", "1")
    await load(has, "x", folder)
    await eventually(lambda: served.gateway.router.profile("x"))
    cards = await listed(served)
    assert (cards["x"]["parent"], cards["fake"]["parent"]) == ("fake", None)

    async def second_turn(model: str, text: str, **more: Any) -> Reply:
        """The same prompt twice; the second is warm."""
        first = await turn(served, model, text, **more)
        assert (first.status, predicted(first), delivered(first)) == (200, 0, 0)
        by = by_id[first.header("x-headwater-worker")]
        await await_in_step(served.gateway._index, by)
        second = await turn(served, model, text, **more)
        assert predicted(second) == delivered(second) > len(text) // 2
        assert second.header("x-headwater-worker") == first.header("x-headwater-worker")
        return second

    at = has.url.removeprefix("http://")
    assert (await second_turn("x", LONG)).header("x-headwater-worker") == at
    assert (await second_turn("x", LONG, cache_salt="s")).header("x-headwater-worker") == at
    await second_turn("fake", LONG)

    write_fake(folder, "2")
    await load(has, "x", folder, load_inplace=True)
    before = served.gateway.router.profile("x")
    await eventually(lambda: served.gateway.router.profile("x") != before)
    await second_turn("x", LONG)

    await unload(has, "x")
    gone_at = Stopwatch()
    assert (await turn(served, "x", LONG)).status == 404
    await eventually(lambda: served.gateway.router.profile("x") is None)
    assert gone_at.seconds() < HEALTH_S + 1.0
    reply = await turn(served, "x", LONG)
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    assert reply.header("x-headwater-worker") is None
    assert "x" not in await listed(served)
    assert (await turn(served, "fake", LONG)).status == 200


async def test_a_worker_that_just_lost_it_is_followed_by_one_that_has_it(
    stub: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    gone = error_body(ModelNotFound("The model 'm' does not exist.", param="model"))
    head = b"HTTP/1.1 404 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    lost, has = await stub(), await stub()
    served = await serve(lost, has)
    lost.plays([head % len(gone) + gone])
    has.plays(completion("here"))
    for _ in range(6):
        reply = await ask(served.url, CHAT, chat())
        assert (reply.status, reply.header("x-headwater-worker")) == (200, has.id)
    assert lost.seen
    metrics = (await ask(served.admin, "/metrics")).body.decode()
    assert f'headwater_retries_total{{reason="{MODEL_GONE}"}}' in metrics
    assert {w.failure_rate for w in served.gateway.router.workers(0.0)} == {0.0}
    # nobody has it: the client gets what the worker said
    has.plays([head % len(gone) + gone])
    reply = await ask(served.url, CHAT, chat())
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")


async def test_adapters_of_a_foreign_server_have_a_scope_of_their_own(
    stub: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    foreign = await stub(models=("m", "x"))
    foreign.parents = {"x": "m"}
    served = await serve(foreign)
    await eventually(lambda: served.gateway.router.profile("x"))
    scopes = {name: served.gateway.router.profile(name).adapter for name in ("m", "x")}
    assert scopes == {"m": "", "x": "x@"}
    foreign.models = ("m",)
    await eventually(lambda: served.gateway.router.profile("x") is None)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_a_client_cannot_load_through_the_gateway(
    stub: Callable[..., Any], serve: Callable[..., Any], path: str
) -> None:
    worker = await stub()
    served = await serve(worker)
    for target in (path, f"{path}/", path.replace("load_", "%6coad_"), f"{path};x"):
        reply = await ask(served.url, target, {"model": "m", "lora_name": "x", "lora_path": "/"})
        assert reply.status == 404
    assert worker.seen == []


async def test_a_relayed_request_without_a_model_means_the_model_itself(
    worker_process: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path
) -> None:
    worker = worker_process("--lora", f"x={write_fake(tmp_path / 'x')}")
    served = await serve(**{"workers.urls": worker.url}, wait=False)
    await eventually(lambda: served.gateway.router.profile("x"))
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        for body in ({"prompt": "abc"}, {"prompt": "abc", "model": "x"}):
            assert (await client.post("/tokenize", json=body)).json()["count"] == 3
