"""``headwater gateway --processes 2``: real processes on one port, one admin listener for all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rig import CHAT, DONE, END, ROLE, SSE_HEAD, STOP, ask, chat, chunk, completion, delta

from gateway.cluster import redisserver
from gateway.config import GatewayConfig
from gateway.processes import parent
from shared.errors import ConfigError
from shared.settings import load

SLACK_S = 90.0
"""A process that starts on a busy machine."""


class Many:
    """A parent with its processes, and its admin listener."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, admin: str) -> None:
        self.process, self.url, self.admin = process, url, admin

    def pids(self) -> list[int]:
        """Of the gateways, as the system knows them."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            # One that was killed may not have been waited for yet.
            with suppress(psutil.Error):
                if "gateway.processes.child" in child.cmdline():
                    found.append(child.pid)
        return found

    async def metric(self, line: str) -> float:
        """A sample of ``/metrics``; 0 if it is not there."""
        text = (await ask(self.admin, "/metrics")).body.decode()
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def until(self, check: Callable[[], Awaitable[bool]]) -> None:
        """Poll what the processes reach by themselves."""
        deadline = time.monotonic() + SLACK_S
        while not await check():
            assert time.monotonic() < deadline, "it did not happen in time"
            await asyncio.sleep(0.05)

    async def states(self) -> set[str]:
        """Of the workers, merged."""
        listed = (await ask(self.admin, "/admin/workers")).json
        return {worker["state"] for worker in listed["workers"]}


@pytest.fixture
async def many(
    free_port: Callable[[], int], tmp_path: Path, stub: object
) -> AsyncIterator[Callable[..., Awaitable[Many]]]:
    """``await many(*flags)``: two processes, all up."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*flags: str) -> Many:
        admin = free_port()
        with (tmp_path / "stderr").open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "gateway", "--port", "0", "--admin-port", str(admin)),
                *("--processes", "2", "--ledger", str(tmp_path / "ledger"), *flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                env={**os.environ, "HEADWATER_WORKERS__HEALTH_INTERVAL_S": "0.1"},
            )
        started.append(process)
        async with asyncio.timeout(SLACK_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("ready "):
                assert line, (tmp_path / "stderr").read_text()[-2000:]
        made = Many(process, line.split()[1], f"http://127.0.0.1:{admin}")

        async def all_up() -> bool:
            return await made.metric("headwater_processes") == 2

        await made.until(all_up)
        return made

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_two_processes_are_one_gateway(many, stub, tmp_path) -> None:
    worker = await stub()
    worker.plays(completion())
    gateway = await many("--workers", worker.url)
    first, second = gateway.pids()

    # spread: connections of their own go to both; the admin listener counts all of them
    sent = 40
    for _ in range(sent):
        assert (await ask(gateway.url, CHAT, chat())).status == 200
    counter = f'headwater_requests_total{{code="200",model="m",route="{CHAT}"}}'
    assert await gateway.metric(counter) == sent
    assert await gateway.metric("headwater_ttft_seconds_count") <= sent
    ledgers = list((tmp_path / "ledger").glob("*.jsonl"))
    assert len(ledgers) == 2
    assert (await ask(gateway.admin, "/admin/report")).json["totals"]["requests"] == sent
    assert all(path.stat().st_size for path in ledgers), "one process got nothing"
    assert (await ask(gateway.admin, "/admin/explain", chat())).json["choice"]
    assert (await ask(gateway.admin, "/dashboard/state")).json["totals"]["requests"] == sent
    assert (await ask(gateway.admin, "/dashboard")).status == 200
    assert (await ask(gateway.admin, "/admin/process/adopt", {"process": 0})).status != 404

    # a process is killed: no request fails, and it is replaced
    os.kill(first, signal.SIGKILL)

    async def replaced() -> bool:
        assert (await ask(gateway.url, CHAT, chat())).status == 200
        return len(set(gateway.pids()) - {first}) == 2 and (
            await gateway.metric("headwater_processes") == 2
        )

    await gateway.until(replaced)
    assert await gateway.metric("headwater_process_restarts_total") == 1
    assert second in gateway.pids()
    assert await gateway.metric(counter) >= sent

    # drain reaches all, the new one too, and is told to one that comes later
    [name] = [w["id"] for w in (await ask(gateway.admin, "/admin/workers")).json["workers"]]
    reply = await ask(gateway.admin, f"/admin/workers/{name}/drain", {})
    assert (reply.status, reply.json["processes"]) == (200, 2)
    assert {(await ask(gateway.url, CHAT, chat())).status for _ in range(12)} == {503}
    assert (await ask(gateway.admin, "/admin/workers/nobody/drain", {})).status == 404
    os.kill(second, signal.SIGKILL)

    async def drained_again() -> bool:
        if await gateway.metric("headwater_process_restarts_total") < 2:
            return False
        if await gateway.metric("headwater_processes") < 2:
            return False
        return {(await ask(gateway.url, CHAT, chat())).status for _ in range(12)} == {503}

    await gateway.until(drained_again)
    assert await gateway.states() == {"draining"}
    reply = await ask(gateway.admin, f"/admin/workers/{name}/undrain", {})
    assert reply.json["processes"] == 2
    assert {(await ask(gateway.url, CHAT, chat())).status for _ in range(12)} == {200}


async def test_sigterm_drains_the_streams_of_all(many, stub) -> None:
    worker = await stub()
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), 2.0, chunk(delta("b") + STOP + DONE), END])
    gateway = await many("--workers", worker.url)
    children = gateway.pids()
    streams = [asyncio.create_task(ask(gateway.url, CHAT, chat(stream=True))) for _ in range(10)]
    deadline = time.monotonic() + SLACK_S
    while len(worker.seen) < 10:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    gateway.process.terminate()
    replies = await asyncio.gather(*streams)
    assert all((r.text, r.events[-1], r.complete) == ("ab", "[DONE]", True) for r in replies)
    assert await gateway.process.wait() == 0
    assert not any(psutil.pid_exists(pid) for pid in children)


def test_without_a_redis_to_start_the_mistake_names_the_fix(monkeypatch) -> None:
    monkeypatch.setattr(redisserver.shutil, "which", lambda _name: None)
    monkeypatch.setattr(redisserver, "find_spec", lambda _name: None)
    flags = {"listen.port": 0, "listen.admin_port": 0, "listen.processes": 2}
    config = load(GatewayConfig, file=None, env={"HEADWATER_REDIS__URL": "none"}, flags=flags)
    with pytest.raises(ConfigError, match=r"redis\.url: 'none': .*headwater\[redis-server\]"):
        parent.run(config, parent.Origin(lambda: config, None, flags), lambda _text: None)
