"""F02: SIGTERM lets running answers finish, of G and of E; what takes too long is told so.

G is a process in front of a stub; E is the fake worker. Times have slack for a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass, field
from subprocess import Popen
from typing import Any

import pytest
from caserig import GatewayLauncher, check_error, settles, wait_until
from conftest import WorkerLauncher
from rig import CHAT, DONE, END, ROLE, SSE_HEAD, STOP, Mark, RawClient, Reply, ask, chunk, delta
from stopwatch import Stopwatch, look

STREAMS = 20
ANSWER_S = 2.0
SLACK_S = 5.0


@dataclass
class Server:
    """G or E while it is stopped."""

    url: str
    process: Popen[bytes]
    clients: list[RawClient] = field(default_factory=list)

    def body(self, **more: Any) -> dict[str, Any]:
        return {
            "model": "fake",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 40,
            "ignore_eos": True,
            "stream": True,
            **more,
        }

    async def begun(self) -> list[asyncio.Task[Reply]]:
        """Streams that have all been asked for."""
        for _ in range(STREAMS):
            client = await self.dial()
            await client.send("POST", CHAT, json.dumps(self.body()).encode())
        return [asyncio.create_task(client.read()) for client in self.clients[-STREAMS:]]

    async def dial(self) -> RawClient:
        self.clients.append(await RawClient.connect(self.url))
        return self.clients[-1]

    async def ends(self) -> int:
        while self.process.poll() is None:
            look()
            await asyncio.sleep(0.01)
        return int(self.process.returncode)


@pytest.fixture(params=["gateway", "worker"])
async def launch(request, stub, gateway_process: GatewayLauncher, worker_process: WorkerLauncher):
    """``await launch(drain_s, endless=False)``: G or E with ``STREAMS`` running answers."""

    servers: list[Server] = []

    async def gateway(drain_s: str, endless: bool) -> tuple[Server, Any]:
        worker = await stub(("fake",))
        rest = [Mark.HANG] if endless else [ANSWER_S, chunk(delta("b") + STOP + DONE), END]
        worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), *rest])
        made = await asyncio.to_thread(
            gateway_process, worker.url, env={"HEADWATER_LISTEN__DRAIN_S": drain_s}
        )

        async def all_seen() -> bool:
            return len(worker.seen) == STREAMS

        return Server(made.url, made.process), all_seen

    async def own_worker(drain_s: str, endless: bool) -> tuple[Server, Any]:
        step_ms = 60_000 if endless else ANSWER_S * 1000 / 40
        env = {
            "HEADWATER_SERVE__DRAIN_S": drain_s,
            "HEADWATER_FAKE__DECODE_MS_PER_STEP": str(min(step_ms, 200.0)),
        }
        made = await asyncio.to_thread(worker_process, env=env)

        async def all_run() -> bool:
            return bool((await ask(made.url, "/headwater/load")).json["running"] == STREAMS)

        return Server(made.url, made.process), all_run

    async def start(drain_s: float = 30.0, *, endless: bool = False):
        begin = gateway if request.param == "gateway" else own_worker
        server, all_run = await begin(str(drain_s), endless)
        if endless:
            server.body = lambda **more: {**Server.body(server, **more), "max_tokens": 4000}  # type: ignore[method-assign]
        servers.append(server)
        idle = await server.dial()
        streams = await server.begun()
        await settles(all_run, 20)
        return server, streams, idle

    yield start
    for client in (client for server in servers for client in server.clients):
        client.abort()
    await asyncio.sleep(0)


async def unready(server: Server) -> bool:
    """It has heard that it is to end."""
    return (await ask(server.url, "/ready")).status == 503


async def test_what_runs_is_finished_and_nothing_new_is_begun(launch) -> None:
    server, streams, idle = await launch()
    server.process.terminate()
    told = time.monotonic()

    await settles(lambda: unready(server), SLACK_S)
    assert not any(stream.done() for stream in streams) or time.monotonic() - told > ANSWER_S / 2
    late = await idle.ask("POST", CHAT, json.dumps(server.body()).encode())
    check_error(late, 503)
    assert int(late.header("retry-after") or 0) >= 1
    replies = await asyncio.gather(*streams)
    ended = Stopwatch()
    assert {reply.status for reply in replies} == {200}
    assert all(reply.complete and reply.events[-1] == "[DONE]" for reply in replies)
    assert all('"finish_reason": null' not in reply.events[-2] for reply in replies)
    assert all("error" not in json.loads(reply.events[-2]) for reply in replies)
    assert await server.ends() == 0
    assert ended.seconds() < 1.0 + SLACK_S


async def test_what_takes_too_long_is_told_so(launch) -> None:
    server, streams, _ = await launch(0.3, endless=True)
    server.process.terminate()
    replies = await asyncio.gather(*streams)
    for reply in replies:
        assert reply.complete
        assert reply.events[-1] != "[DONE]"
        assert json.loads(reply.events[-1])["error"]["message"]
    assert await server.ends() == 0


async def test_a_second_signal_leaves_at_once(launch) -> None:
    server, streams, _ = await launch(endless=True)
    server.process.terminate()
    await settles(lambda: unready(server), SLACK_S)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(wait_until, lambda: server.process.poll() is not None, SLACK_S)
    assert server.process.returncode != 0
    await asyncio.gather(*streams, return_exceptions=True)
