"""Configuration again while it runs: what is taken over, what waits, what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rig import HANG, ROLE, SSE_HEAD, chunk, delta, eventually

from gateway.config import DiscoveryConfig, FileConfig, GatewayConfig
from gateway.configwatch import ConfigWatch
from gateway.reload import RELOADABLE, Changes, compare, is_reloadable, values
from shared.errors import ConfigError
from shared.layers import leaves
from shared.settings import load

ROOT = Path(__file__).resolve().parents[2]


def config(**flags: Any) -> GatewayConfig:
    return load(GatewayConfig, file=None, env={}, flags=flags)


def test_every_reloadable_key_exists_and_is_documented() -> None:
    keys = [key for key, _ in leaves(GatewayConfig)]
    intro = (ROOT / "docs" / "configuration.md").read_text().split("## headwater gateway")[0]
    for one in RELOADABLE:
        assert any(key.startswith(one) for key in keys), one
        assert (f"`[{one[:-1]}]`" if one.endswith(".") else f"`{one}`") in intro, one


def test_only_reloadable_keys_are_taken_over() -> None:
    before = config()
    wanted = config(
        **{
            "workers.urls": "http://a:1",
            "routing.policy": "random",
            "listen.port": 9000,
            "redis.url": "redis://r:1",
            "log.level": "debug",
            "discovery.file.path": "w.toml",
        }
    )
    changes = compare(before, wanted)
    assert set(changes.applied) == {
        "workers.urls",
        "routing.policy",
        "log.level",
        "discovery.file.path",
    }
    assert set(changes.pending) == {"listen.port", "redis.url"}
    assert changes.config.workers.urls == ("http://a:1",)
    assert changes.config.listen == before.listen
    assert changes.config.redis == before.redis
    assert compare(before, before) == Changes(before, (), ())


def test_every_key_is_either_taken_over_or_named() -> None:
    """No key is lost on the way: each one alone shows up in exactly one of the two lists."""
    before = config()
    known = values(before)
    for key, value in known.items():
        other = _changed(before, key, value)
        changes = compare(before, other)
        assert (changes.applied, changes.pending) in [((key,), ()), ((), (key,))], key
        assert bool(changes.applied) is is_reloadable(key)
        kept = values(changes.config)[key]
        assert kept == (values(other)[key] if changes.applied else value)


def _changed(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    if rest:
        inner = _changed(getattr(config, name), rest, value)
        return msgspec.structs.replace(config, **{name: inner})
    return msgspec.structs.replace(config, **{name: ("other", value)})


class Applied:
    """Stands in for a gateway."""

    def __init__(self, first: GatewayConfig) -> None:
        self.config = first
        self.times = 0

    async def __call__(self, wanted: GatewayConfig) -> Changes:
        self.times += 1
        changes = compare(self.config, wanted)
        self.config = changes.config
        return changes


async def test_a_changed_file_is_loaded_and_a_broken_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text('[routing]\npolicy = "cost"\n')

    def read() -> GatewayConfig:
        return load(GatewayConfig, file=path, env={}, flags={})

    applied = Applied(read())
    watch = ConfigWatch(path, read, applied, 0.02)
    task = asyncio.create_task(watch.run())
    try:
        path.write_text('[routing]\npolicy = "random"\n[listen]\nport = 9\n')
        await eventually(lambda: applied.config.routing.policy == "random", 20.0)
        await eventually(lambda: watch.pending == ("listen.port",), 20.0)
        assert "listen.port" in watch.notes()[0]
        path.write_text('[routing]\npolicyy = "cost"\n')
        await eventually(lambda: "did you mean routing.policy" in watch.fault, 20.0)
        assert applied.config.routing.policy == "random"
        path.write_text('[routing]\npolicy = "cost"\n')
        await eventually(lambda: applied.config.routing.policy == "cost", 20.0)
        await eventually(lambda: watch.notes() == [], 20.0)
        times = applied.times
        watch.ask()  # SIGHUP loads also what looks the same
        await eventually(lambda: applied.times == times + 1, 20.0)
    finally:
        task.cancel()


async def test_a_running_gateway_takes_over_what_it_can(
    serve: Any, stub: Any, tmp_path: Path
) -> None:
    one, two, three = await stub(), await stub(), await stub()
    served = await serve(one)
    gateway = served.gateway
    present = gateway._config
    listed = tmp_path / "w.json"
    listed.write_text(json.dumps({"workers": [three.url]}))

    def with_(**sections: Any) -> GatewayConfig:
        made = present
        for name, fields in sections.items():
            section = msgspec.structs.replace(getattr(made, name), **fields)
            made = msgspec.structs.replace(made, **{name: section})
        return made

    def ids() -> set[str]:
        return {str(w.id) for w in gateway.router.workers(0.0) if not w.reason}

    try:
        wanted = with_(
            workers={"urls": (two.url,)},
            routing={"policy": "round_robin", "retries": 0},
            listen={"max_body_mib": 0.001, "admin_port": 1},
            log={"level": "error"},
        )
        changes = await gateway.reload(wanted)
        assert changes.pending == ("listen.admin_port",)
        await eventually(lambda: ids() == {two.id}, 20.0)
        assert gateway.app._max_body == 1048
        assert gateway.router._config.policy == "round_robin"
        assert logging.getLogger().level == logging.ERROR
        broken = with_(workers={"urls": ("nowhere",)}, routing={"policy": "random"})
        with pytest.raises(ConfigError, match=r"workers\.urls"):
            await gateway.reload(broken)
        assert ids() == {two.id}
        assert gateway.router._config.policy == "round_robin"
        file = FileConfig(path=str(listed), interval_s=0.05)
        await gateway.reload(with_(discovery={"file": file}))
        await eventually(lambda: ids() == {one.id, three.id}, 20.0)
        await gateway.reload(with_(discovery={"file": DiscoveryConfig().file}))
        await eventually(lambda: ids() == {one.id}, 20.0)
    finally:
        await gateway.reload(present)


async def test_sighup_reaches_a_gateway_process(tmp_path: Path) -> None:
    import os
    import sys

    path = tmp_path / "gateway.toml"
    base = "[listen]\nport = 0\nadmin_port = 0\n"
    path.write_text(base)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gateway", "-c", str(path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HEADWATER_LOG__FORMAT": "json"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60.0):
            assert (await process.stdout.readline()).startswith(b"listening ")
            path.write_text(base + '[routing]\npolicy = "none of them"\n')
            process.send_signal(signal.SIGHUP)
            assert "none of them" in (await _event(process.stderr, "config_not_reloaded"))["reason"]
            path.write_text(base + '[routing]\npolicy = "random"\n[ledger]\nrotate_mib = 1\n')
            process.send_signal(signal.SIGHUP)
            told = await _event(process.stderr, "config_reloaded")
        assert told["applied"] == ["routing.policy"]
        assert told["needs_restart"] == ["ledger.rotate_mib"]
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def _event(stream: asyncio.StreamReader, name: str) -> dict[str, Any]:
    while line := await stream.readline():
        told: dict[str, Any] = json.loads(line)
        if told.get("event") == name:
            return told
    raise AssertionError(f"no {name}")


async def test_more_room_lets_those_pass_who_wait(serve: Any, stub: Any) -> None:
    import aiohttp

    worker = await stub()
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), HANG])
    served = await serve(worker, **{"admission.inflight_per_worker": 1})
    gateway = served.gateway
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{served.url}/v1/chat/completions", json=body) as response:
            await response.read()

    async with aiohttp.ClientSession() as session:
        running = [asyncio.create_task(ask(session)) for _ in range(2)]
        await eventually(lambda: len(worker.seen) == 1, 20.0)
        await eventually(gateway.pipeline._gate.queue.depths, 20.0)
        admission = msgspec.structs.replace(gateway._config.admission, inflight_per_worker=2)
        await gateway.reload(msgspec.structs.replace(gateway._config, admission=admission))
        await eventually(lambda: len(worker.seen) == 2, 20.0)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
