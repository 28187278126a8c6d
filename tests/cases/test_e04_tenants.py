"""E04: what one tenant sent can be told by another neither from its own hits nor by placement."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from caserig import COMPLETIONS, GatewayLauncher
from conftest import WorkerProcess
from rig import CHAT, RawClient, Reply, ask, chat, completion, eventually

from gateway.config import (
    GatewayConfig,
    ListenConfig,
    StaticWorker,
    TenancyConfig,
    WorkersConfig,
)
from gateway.engines import plain
from gateway.engines.base import Salting
from gateway.openers import check_config
from shared.errors import ConfigError

KEYS = {"HEADWATER_LISTEN__API_KEYS": "sk-one,sk-two"}
TWO = {"listen.api_keys": "sk-one,sk-two", "tenancy.unisolated": "allow"}


def bearer(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")


def cached(reply: Reply) -> int:
    assert reply.status == 200, reply.body
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


async def send(url: str, key: str, text: str, **more: Any) -> Reply:
    body = {"model": "fake", "prompt": text, "max_tokens": 2, **more}
    return await ask(url, COMPLETIONS, body, bearer(key))


async def settled(url: str, key: str, text: str, **more: Any) -> Reply:
    """Repeated until its own cache is known (events take a moment)."""
    for _ in range(50):
        reply = await send(url, key, text, **more)
        if reply.header("x-headwater-matched-tokens") not in (None, "0"):
            break
    return reply


async def test_a_tenant_sees_its_own_cache_and_nobody_elses(
    fake_worker: WorkerProcess, gateway_process: GatewayLauncher
) -> None:
    gateway = gateway_process(fake_worker.url, env=KEYS)
    secret = "the launch codes are in the blue folder " * 20
    assert cached(await send(gateway.url, "sk-one", secret)) == 0
    own = await settled(gateway.url, "sk-one", secret)
    assert cached(own) > 700
    for guess in ({}, {"cache_salt": "sk-one"}, {"cache_salt": "key1"}, {"cache_salt": "tenant:a"}):
        reply = await send(gateway.url, "sk-two", secret, **guess)
        assert cached(reply) == 0, guess
        assert reply.header("x-headwater-matched-tokens") == "0"
    # Narrower still, by the client's own choice.
    assert cached(await send(gateway.url, "sk-one", secret, cache_salt="mine")) == 0
    assert cached(await settled(gateway.url, "sk-one", secret, cache_salt="mine")) > 700


async def test_without_isolation_all_share_and_without_keys_nothing_is_added(
    fake_worker: WorkerProcess, gateway_process: GatewayLauncher
) -> None:
    text = "what everybody may know about everything " * 20
    gateway = gateway_process(fake_worker.url, env={**KEYS, "HEADWATER_TENANCY__ISOLATION": "off"})
    assert cached(await send(gateway.url, "sk-one", text)) == 0
    assert cached(await send(gateway.url, "sk-two", text)) > 700


async def test_groups_and_shared_tenants(stub, serve, tmp_path) -> None:
    worker = await stub()
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(
            f'[[keys]]\nkey = "sk-{name}"\ntenant = "{name}"\n' for name in ("a", "b", "c", "d")
        )
        + '[tenants.a]\ngroup = "g"\n[tenants.b]\ngroup = "g"\n[tenants.d]\nshared = true\n'
    )
    allowed = {"tenancy.unisolated": "allow"}
    served = await serve(worker, **{"tenancy.keys_file": str(file), **allowed})
    worker.respond = lambda seen: completion()

    async def matched(name: str, text: str) -> int:
        reply = await ask(served.url, CHAT, chat(text), bearer(f"sk-{name}"))
        assert reply.status == 200
        return int(reply.header("x-headwater-matched-tokens") or 0)

    text = "to be or not to be, that is the question " * 30
    assert await matched("a", text) == 0
    assert await matched("b", text) > 0
    assert await matched("c", text) == 0
    assert await matched("d", text) == 0
    assert "understands no cache_salt" in str((await ask(served.url, "/ready")).json["notes"])
    # This make of engine knows no salt, so none is sent.
    assert all("cache_salt" not in seen.json for seen in worker.seen)


async def test_an_engine_that_cannot_keep_tenants_apart_gets_no_request(stub, serve) -> None:
    worker = await stub()
    worker.respond = lambda seen: completion()
    served = await serve(worker, wait=False, **{"listen.api_keys": "sk-one,sk-two"})
    await eventually(lambda: served.gateway.router.workers(0.0))
    reply = await ask(served.url, CHAT, chat(), bearer("sk-one"))
    assert reply.status == 503
    assert worker.seen == []
    ready = await ask(served.url, "/ready")
    assert ready.status == 503
    assert "understands no cache_salt" in str(ready.json["reasons"])
    # With the override, at once; and kept out again without it.
    config = served.gateway._config
    for unisolated, status in (("allow", 200), ("refuse", 503)):
        tenancy = msgspec.structs.replace(config.tenancy, unisolated=unisolated)
        await served.gateway.reload(msgspec.structs.replace(config, tenancy=tenancy))
        assert (await ask(served.url, CHAT, chat(), bearer("sk-one"))).status == status


async def test_one_tenant_has_nobody_to_be_kept_apart_from(stub, serve) -> None:
    worker = await stub()
    worker.respond = lambda seen: completion()
    served = await serve(worker, **{"listen.api_keys": "sk-one"})
    assert (await ask(served.url, CHAT, chat(), bearer("sk-one"))).status == 200


@pytest.mark.parametrize("make", ["openai", "tgi", "llamacpp", "vllm", "sglang", "headwater"])
def test_a_gateway_does_not_start_with_named_engines_that_cannot(make) -> None:
    keys = ListenConfig(api_keys=("one", "two"))
    for workers in (
        WorkersConfig(urls=("http://w:1",), engine=make),
        WorkersConfig(static=(StaticWorker("http://w:1", engine=make),)),
    ):
        check_config(GatewayConfig(workers=workers))
        allowed = TenancyConfig(unisolated="allow")
        check_config(GatewayConfig(listen=keys, workers=workers, tenancy=allowed))
        config = GatewayConfig(listen=keys, workers=workers)
        if make in ("vllm", "sglang", "headwater"):
            check_config(config)
        else:
            with pytest.raises(ConfigError, match=r"tenancy\.unisolated"):
                check_config(config)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", CHAT, COMPLETIONS])
async def test_an_engine_that_understands_salts_gets_them_on_every_route(
    stub, serve, monkeypatch, path: str
) -> None:
    monkeypatch.setattr(plain.PlainEngine, "salting", Salting.ROOT)
    worker = await stub()
    served = await serve(worker, **{"listen.api_keys": "sk-one,sk-two"})
    worker.respond = lambda seen: completion()
    body = {**chat(), "prompt": "hi", "input": "x"}
    for key, own in (("sk-one", None), ("sk-two", None), ("sk-one", None), ("sk-one", "mine")):
        salted = body if own is None else {**body, "cache_salt": own}
        assert (await ask(served.url, path, salted, bearer(key))).status == 200
    one, two, again, narrower = (seen.json["cache_salt"] for seen in worker.seen)
    assert one == again
    assert len({one, two, narrower, "mine"}) == 4
    assert all({**seen.json, "cache_salt": 0} == {**worker.seen[0].json, "cache_salt": 0}
               for seen in worker.seen)  # fmt: skip


async def test_limits(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker, **{**TWO, "tenancy.requests_per_minute": 3})
    worker.respond = lambda seen: completion()
    statuses = []
    for _ in range(5):
        reply = await ask(served.url, CHAT, chat(), bearer("sk-one"))
        statuses.append(reply.status)
    assert statuses == [200, 200, 200, 429, 429]
    assert reply.json["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(reply.header("retry-after") or 0) <= 20
    assert (await ask(served.url, CHAT, chat(), bearer("sk-two"))).status == 200
    assert len(worker.seen) == 4
    metrics = (await ask(served.admin, "/metrics")).body.decode()
    assert 'headwater_shed_total{reason="tenant_limit"} 2.0' in metrics


async def test_what_runs_is_counted_until_its_client_has_left(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker, **{"listen.api_keys": "sk-one", "tenancy.concurrent": 1})
    worker.frozen = True
    client = await RawClient.connect(served.url)
    await client.send("POST", CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}]}',
                      ("Content-Type", "application/json"), bearer("sk-one"))  # fmt: skip
    meters = served.gateway._meters
    await eventually(lambda: meters.running("key1") == 1)
    assert (await ask(served.url, CHAT, chat(), bearer("sk-one"))).status == 429
    client.abort()
    await eventually(lambda: meters.running("key1") == 0)
    worker.frozen = False
