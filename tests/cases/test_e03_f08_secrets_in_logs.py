"""E03, F08: no key, password or prompt in logs, metrics or answers, whatever goes wrong."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from caserig import COMPLETIONS, GatewayLauncher, body_for, wait_until
from rig import CHAT, CUT, ROLE, ask, completion, cut_stream, delta, eventually, plain

HEADERS = (("Authorization", "Bearer sk-CANARY-1"), ("x-api-key", "CANARY-2"))
SCRIPTS: dict[str, list[Any]] = {
    "good": completion(),
    "400": plain(b'{"error":{"message":"no","type":"t"}}', 400),
    "401": plain(b"", 401),
    "500": plain(b"x", 500),
    "cut": [CUT],
    "broken": cut_stream(ROLE, delta("x")),
}


async def everything(served: Any, prompt: str) -> list[Any]:
    """Requests of all kinds, good ones and bad ones."""
    replies = []
    for path in (CHAT, COMPLETIONS):
        for stream in (False, True):
            body = body_for(path, prompt, stream=stream)
            replies.append(await ask(served.url, f"{path}?key=CANARY-3", body, *HEADERS))
    bad = body_for(CHAT, prompt, max_tokens="many")
    replies.append(await ask(served.url, CHAT, bad, *HEADERS))
    replies.append(await ask(served.url, CHAT, {**bad, "model": "none"}, *HEADERS))
    torn = json.dumps(body_for(CHAT, prompt)).encode()[:-3]
    replies.append(await ask(served.url, CHAT, torn, *HEADERS))
    replies.append(await ask(served.url, "/nowhere?key=CANARY-3", None, *HEADERS))
    replies.append(await ask(served.url, "/v1/embeddings", {"model": "m", "input": prompt}))
    return replies


@pytest.mark.parametrize("kind", SCRIPTS)
async def test_nothing_is_told(stub, serve, log: io.StringIO, kind: str) -> None:
    worker = await stub()
    served = await serve(
        worker,
        **{
            "workers.api_key": "CANARY-4",
            "redis.url": "redis://:CANARY-5@127.0.0.1:1/0",
            "log.level": "debug",
        },
    )
    worker.plays(SCRIPTS[kind])
    replies = await everything(served, "the CANARY-6 prompt")
    await worker.stop()
    replies += [await ask(served.url, CHAT, body_for(CHAT, "CANARY-6"), *HEADERS)]
    pages = [
        await ask(served.admin, path) for path in ("/metrics", "/admin/workers", "/admin/report")
    ]
    pages += [await ask(served.url, path) for path in ("/ready", "/health", "/v1/models")]
    await served.gateway.drain()  # lines of requests are written together
    await asyncio.sleep(0.3)
    told = log.getvalue()
    assert "CANARY" not in told, told[max(0, told.find("CANARY") - 300) :][:600]
    for page in pages:
        assert b"CANARY" not in page.body
    for reply in replies:
        assert not any(
            secret in reply.body for secret in (b"CANARY-1", b"CANARY-2", b"CANARY-4", b"CANARY-5")
        )


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="Linux shows arguments so")
def test_a_list_of_processes_shows_no_password(gateway_process: GatewayLauncher) -> None:
    secret = "redis://user:CANARY-5@127.0.0.1:1/0"
    gateway = gateway_process(redis=secret, flags=("--processes", "2"), wait=False)
    listed: list[bytes] = []

    def all_there() -> bool:
        listed[:] = [
            path.read_bytes()
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if _belongs_to(gateway.process.pid, path.parent)
        ]
        return len(listed) == 3

    wait_until(all_there)
    assert any(b"user:********@" in line for line in listed)
    assert not any(b"CANARY" in line for line in listed)
    assert "CANARY" not in gateway.stdout.read_text() + gateway.stderr.read_text()


def _belongs_to(pid: int, folder: Path) -> bool:
    try:
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False  # it has ended
    return pid in (int(folder.name), int(parent))


async def test_one_line_a_request_with_the_facts(stub, serve, log: io.StringIO) -> None:
    worker = await stub()
    served = await serve(worker)
    for n in range(5):
        reply = await ask(served.url, CHAT, body_for(CHAT, f"CANARY-6 {n}"))
        assert reply.status == 200

    def told() -> list[Any]:
        lines = [json.loads(line) for line in log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == "request"]

    await eventually(lambda: len(told()) == 5)
    wanted = {"id", "model", "worker", "status", "prompt_tokens", "cached_tokens", "total_s"}
    for line in told():
        assert wanted <= line.keys()


async def test_a_model_name_cannot_forge_a_line(stub, serve, log: io.StringIO) -> None:
    worker = await stub()
    served = await serve(worker)
    forged = 'x\n{"level":"x","event":"forged"}\r\n\x1b[31m'
    before = len(log.getvalue().splitlines())
    for path in (CHAT, COMPLETIONS, "/v1/embeddings"):
        await ask(served.url, path, {**body_for(path, "x"), "model": forged})
    await eventually(lambda: len(log.getvalue().splitlines()) >= before + 3)
    lines = log.getvalue().splitlines()[before:]
    for line in lines:
        assert json.loads(line)["event"] != "forged"
        assert "\x1b" not in line
