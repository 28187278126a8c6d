"""What the cases share: a gateway process, metrics as values, answers as clients see them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families
from rig import CHAT, Reply, Script, Seen, Stub, ask, chat, completion
from stopwatch import Limit

STARTUP_S = 60.0
COMPLETIONS = "/v1/completions"
QUICK = {
    "HEADWATER_WORKERS__HEALTH_INTERVAL_S": "0.2",
    # A busy machine is no reason to give a worker up.
    "HEADWATER_WORKERS__HEALTH_TIMEOUT_S": "5.0",
}


# --- a gateway process ---------------------------------------------------------------------------


@dataclass(eq=False)
class GatewayProcess:
    """One ``python -P -m gateway`` on loopback."""

    process: subprocess.Popen[bytes]
    admin: str
    stdout: Path
    stderr: Path
    url: str = ""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30, trust_env=False))
    """For all requests to it: making a client takes longer than a request."""

    def await_line(self, word: str, within_s: float = STARTUP_S) -> str:
        """The URL in the line that begins with ``word``."""
        limit = Limit(within_s)
        while not limit.over():
            for line in self.stdout.read_text().splitlines():
                if line.startswith(f"{word} "):
                    return line.split()[1]
            code = self.process.poll()
            assert code is None, f"gateway ended with {code}: {self.stderr.read_text()[-4000:]}"
            time.sleep(0.02)
        raise AssertionError(f"no {word!r} from the gateway: {self.stderr.read_text()[-4000:]}")

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL: it is gone afterwards."""
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def workers(self) -> list[dict[str, Any]]:
        """``GET /admin/workers``."""
        listed: list[dict[str, Any]] = self.get("/admin/workers")["workers"]
        return listed

    def worker(self, worker: str) -> dict[str, Any]:
        """One of them."""
        return next(each for each in self.workers() if each["id"] == worker)

    def get(self, path: str) -> Any:
        """A JSON answer of the admin listener."""
        return self.http.get(f"{self.admin}{path}").json()

    def public(self, path: str) -> Any:
        """A JSON answer of the public listener."""
        return self.http.get(f"{self.url}{path}").json()

    def explain(self, body: Mapping[str, Any]) -> dict[str, int]:
        """Matched tokens of each worker, as the gateway believes now."""
        answer = self.http.post(f"{self.admin}/admin/explain", json=body)
        assert answer.status_code == 200, answer.text
        return {each["id"]: each["matched_tokens"] for each in answer.json()["workers"]}

    def await_exact(self, n_workers: int, within_s: float = 20.0) -> None:
        """Return once so many workers are ready and their cache events flow."""

        def settled() -> bool:
            known = self.workers()
            good = [w for w in known if w["state"] == "ready" and w["trust"] == "exact"]
            return len(good) == len(known) == n_workers

        wait_until(settled, within_s)


@dataclass(eq=False)
class GatewayLauncher:
    """Starts gateways whose output goes to ``directory``, and ends them all."""

    directory: Path
    pick_port: Callable[[], int]
    gateways: list[GatewayProcess] = field(default_factory=list)

    def __call__(
        self,
        *worker_urls: str,
        redis: str = "none",
        flags: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        wait: bool = True,
    ) -> GatewayProcess:
        """One more gateway; None as a value of ``env`` unsets a variable."""
        admin_port, place = self.pick_port(), f"gateway{len(self.gateways)}"
        command = [sys.executable, "-P", "-m", "gateway", "--port", "0"]
        command += ["--admin-port", str(admin_port), "--redis", redis, *flags]
        if worker_urls:
            command += ["--workers", ",".join(worker_urls)]
        merged = {**os.environ, **QUICK, **(env or {})}
        stdout, stderr = self.directory / f"{place}.out", self.directory / f"{place}.err"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env={name: value for name, value in merged.items() if value is not None},
            )
        made = GatewayProcess(process, f"http://127.0.0.1:{admin_port}", stdout, stderr)
        self.gateways.append(made)
        made.url = made.await_line("listening")
        if wait:
            made.await_line("ready")
        return made

    def end(self) -> None:
        """End what still runs."""
        for gateway in self.gateways:
            gateway.stop()


def wait_until(check: Callable[[], object], within_s: float = 20.0) -> float:
    """Poll what a process reaches by itself; returns the seconds that it took."""
    begun, limit = time.monotonic(), Limit(within_s)
    while not check():
        assert not limit.over(), "it did not happen in time"
        time.sleep(0.03)
    return time.monotonic() - begun


# --- requests ------------------------------------------------------------------------------------


def sdk(url: str, **options: Any) -> openai.AsyncOpenAI:
    """SDK of the cases: no retries of its own."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, **options)


def body_for(path: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    """CHAT(text), or the same as a text completion."""
    if path == CHAT:
        return chat(text, **more)
    return {"model": "m", "prompt": text, **more}


def piece(path: str, text: str | None = None, *, finish: str | None = None, **more: Any) -> Any:
    """One chunk of a stream of either route, as a value."""
    base = {"id": "c-1", "created": 1, "model": "m"}
    if path == CHAT:
        content = {} if text is None else {"content": text}
        choice = {"index": 0, "delta": {**content, **more}, "finish_reason": finish}
        return {**base, "object": "chat.completion.chunk", "choices": [choice]}
    choice = {"index": 0, "text": text or "", "finish_reason": finish, **more}
    return {**base, "object": "text_completion", "choices": [choice]}


def contents(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts of the choices in decoded events, of either route, empty ones left out."""
    texts = [
        choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
        for event in events
        for choice in event.get("choices", [])
    ]
    return [text for text in texts if text]


def check_error(reply: Reply, *statuses: int) -> dict[str, Any]:
    """A "JSON error" of the cases with one of these statuses; returns its error object."""
    assert reply.status in statuses, (reply.status, reply.body)
    assert (reply.header("content-type") or "").split(";")[0] == "application/json"
    assert reply.complete
    error: dict[str, Any] = reply.json["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert {"param", "code"} <= set(error)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str | int | float)
    assert "Traceback" not in reply.body.decode()
    return error


async def read_stream(url: str, body: Mapping[str, Any], texts: list[str]) -> None:
    """Read a chat stream with the SDK; ``texts`` keeps what came before an error was raised."""
    async with sdk(url) as client:
        async for part in await client.chat.completions.create(**body):
            texts += [part.choices[0].delta.content or ""]


# --- what a gateway tells about itself -----------------------------------------------------------


async def metrics(admin: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of ``/metrics`` by name and labels."""
    reply = await ask(admin, "/metrics")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


async def total(admin: str, name: str, **labels: str) -> float:
    """Sum of the samples of a name whose labels include these."""
    wanted = set(labels.items())
    return sum(v for (n, held), v in (await metrics(admin)).items() if n == name and wanted <= held)


async def inflight(admin: str) -> dict[str, float]:
    """The in-flight gauge of each worker."""
    return {
        dict(labels)["worker"]: value
        for (name, labels), value in (await metrics(admin)).items()
        if name == "headwater_inflight"
    }


async def settles(
    check: Callable[[], Awaitable[object]], within_s: float, gap_s: float = 0.02
) -> Any:
    """Await ``check`` until it is true; returns its value."""
    limit = Limit(within_s)
    while True:
        value = await check()
        if value:
            return value
        assert not limit.over(), "it did not happen in time"
        await asyncio.sleep(gap_s)


# --- stubs ---------------------------------------------------------------------------------------


def first_then(first: Script, then: Script) -> Callable[[Seen], Script]:
    """For all stubs at once: the first request of all gets ``first``, later ones ``then``."""
    scripts = [first]
    return lambda seen: scripts.pop() if scripts else then


def counts(stubs: Sequence[Stub]) -> list[int]:
    """How many POSTs each stub has seen."""
    return [len(stub.seen) for stub in stubs]


class Clogged:
    """A port on which new connections hang: the queue of a listener that accepts nobody is full.

    Connections that a stub had on that port before stay as they are.
    """

    def __init__(self, port: int) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(0)
        self._fillers: list[socket.socket] = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            self._fillers.append(filler)

    def close(self) -> None:
        """Free the port."""
        for each in (*self._fillers, self._listener):
            each.close()


async def shares_of(
    stubs: Sequence[Stub], send: Callable[[int], Awaitable[Any]], n: int
) -> list[int]:
    """Send ``n`` requests at once, each answered after a while; how many each stub got."""
    before = counts(stubs)
    for stub in stubs:
        stub.respond = None
        stub.plays([0.4, *completion()])
    replies = await asyncio.gather(*(send(number) for number in range(n)))
    assert {reply.status for reply in replies} == {200}
    return [after - first for after, first in zip(counts(stubs), before, strict=True)]
