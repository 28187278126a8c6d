"""R of the cases, and what else stands where one Redis server stands elsewhere.

RedisProxy   a TCP proxy in a thread of its own: delays, freezes, cuts, refuses, changes its target
TlsFront     the same, with TLS to its clients
Cluster      three masters (and replicas), with their slots split
Sentinels    a master, a replica and Sentinels that watch them
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from conftest import RedisServer, end_process, redis_binary
from depth import DEPTH
from ports import pick_port, pick_port_with_bus
from servers import stop_listening
from stopwatch import Limit

_PIECE = 1 << 16


def kinds(usual: str) -> tuple[str, ...]:
    """Server versions for a slow test: one in the ordinary suite, both in the deep one."""
    return ("oldest", "newest") if DEPTH > 1 else (usual,)


class RedisProxy:
    """Stands between everybody and a server. All methods may be called from any thread."""

    def __init__(self, target: int, tls: ssl.SSLContext | None = None) -> None:
        self.target = target
        self.port = pick_port()
        self.delay_s = 0.0
        """Added to each piece that the server sends."""
        self.jitter: Callable[[], float] | None = None
        """If set: adds to the delay."""
        self._tls = tls
        self._open = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._flows: dict[int, _Flow] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.made = 0
        """Connections accepted so far."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.accept()

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def open_connections(self) -> int:
        """Of clients, now."""
        return len(self._flows)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _do(self, body: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(body, self._loop).result(10)

    def accept(self) -> None:
        """Listen (again)."""

        async def listen() -> None:
            if self._server is None:
                self._server = await asyncio.start_server(
                    self._accepted, "127.0.0.1", self.port, ssl=self._tls
                )

        self._do(listen())
        self._open.set()

    def refuse(self) -> None:
        """Nobody listens any more, and what is open is cut."""

        async def close() -> None:
            server, self._server = self._server, None
            if server is not None:
                await stop_listening(server)

        self._do(close())
        self.cut()

    def cut(self, which: Callable[[_Flow], bool] = lambda flow: True) -> int:
        """Reset connections; returns how many."""

        async def end() -> int:
            chosen = [flow for flow in self._flows.values() if which(flow)]
            for flow in chosen:
                flow.abort()
            return len(chosen)

        return int(self._do(end()))

    def freeze(self, which: Callable[[_Flow], bool] | None = None) -> int:
        """No byte passes, sockets stay open: everywhere and in new ones, or for chosen ones."""

        async def stop() -> int:
            if which is None:
                self._open.clear()
                return len(self._flows)
            chosen = [flow for flow in self._flows.values() if which(flow)]
            for flow in chosen:
                flow.frozen = True
            return len(chosen)

        return int(self._do(stop()))

    def thaw(self) -> None:
        """Undo :meth:`freeze`."""
        for flow in list(self._flows.values()):
            flow.frozen = False
        self._open.set()

    def close(self) -> None:
        """End it."""
        self.refuse()

        async def ended() -> None:
            mine = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not mine]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            # Transports that were aborted close their sockets in the next turns.
            for _ in range(3):
                await asyncio.sleep(0.01)

        self._do(ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A task that is cancelled before its first step would leave the socket open."""

        def ended(task: asyncio.Task[None]) -> None:
            writer.transport.abort()
            self._serving.discard(task)

        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(ended)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        number = self.made
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            return
        flow = self._flows[number] = _Flow(writer, upstream[1])
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(flow, reader, upstream[1], up=True))
                group.create_task(self._pass(flow, upstream[0], writer, up=False))
        except* (OSError, ssl.SSLError, _End):
            pass
        finally:
            flow.abort()
            self._flows.pop(number, None)

    async def _pass(
        self,
        flow: _Flow,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        up: bool,
    ) -> None:
        while data := await source.read(_PIECE):
            if up:
                flow.sent += data[:4096]
                del flow.sent[:-8192]
            elif self.delay_s or self.jitter:
                await asyncio.sleep(self.delay_s + (self.jitter() if self.jitter else 0.0))
            while flow.frozen or not self._open.is_set():  # noqa: ASYNC110 - set by other threads
                await asyncio.sleep(0.01)
            sink.write(data)
            await sink.drain()
        raise _End


class _End(Exception):
    """One side has closed."""


@dataclass(eq=False)
class _Flow:
    """One client's connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    frozen: bool = False
    sent: bytearray = field(default_factory=bytearray)
    """The last bytes that the client sent."""

    def abort(self) -> None:
        for side in (self.client, self.server):
            side.transport.abort()

    @property
    def reads_log(self) -> bool:
        """The connection on which a gateway waits for news."""
        return b"XREAD" in self.sent


@contextmanager
def proxy(target: int, tls: ssl.SSLContext | None = None) -> Iterator[RedisProxy]:
    """A proxy for a while."""
    made = RedisProxy(target, tls)
    try:
        yield made
    finally:
        made.close()


def talk(port: int, *command: Any, **options: Any) -> Any:
    """One command to a server on loopback."""
    with redis.Redis(port=port, socket_timeout=5, **options) as client:
        return client.execute_command(*command)


def await_true(check: Callable[[], object], within_s: float = 20.0) -> float:
    """Poll; errors of a server that is not there yet count as no."""
    begun, limit = time.monotonic(), Limit(within_s)
    while True:
        with suppress(redis.RedisError, OSError):
            if check():
                return time.monotonic() - begun
        assert not limit.over(), "it did not happen in time"
        time.sleep(0.02)


# --- Cluster -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Cluster:
    """Three masters with a third of the slots each; ``replicas``: one for each as well."""

    nodes: list[RedisServer]
    masters: list[RedisServer]

    @classmethod
    def start(cls, directory: Path, kind: str = "newest", *, replicas: bool = False) -> Cluster:
        """Start and join them; returns when all slots are served."""
        nodes: list[RedisServer] = []
        made = cls(nodes, nodes)
        try:
            made._start_nodes(directory, kind, 6 if replicas else 3)
            made.masters = nodes[:3]
            made._join()
        except BaseException:
            made.stop()
            raise
        return made

    def _start_nodes(self, directory: Path, kind: str, count: int) -> None:
        for number in range(count):
            folder = directory / f"node{number}"
            folder.mkdir(parents=True)
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
            options += ("--repl-diskless-sync-delay", "0")
            options += ("--cluster-config-file", str(folder / "nodes.conf"))
            options += ("--cluster-port", str(pick_port())) if kind == "newest" else ()
            port = pick_port() if kind == "newest" else pick_port_with_bus()
            node = RedisServer(kind, folder, port, options)
            self.nodes.append(node)
            node.start()

    def _join(self) -> None:
        first = self.nodes[0]
        for place, node in enumerate(self.masters):
            start, end = place * 16384 // 3, (place + 1) * 16384 // 3 - 1
            if self._is("oldest"):
                talk(node.port, "CLUSTER", "ADDSLOTS", *range(start, end + 1))
            else:
                talk(node.port, "CLUSTER", "ADDSLOTSRANGE", start, end)
            talk(node.port, "CLUSTER", "SET-CONFIG-EPOCH", place + 1)
        for node in self.nodes[1:]:
            bus = () if self._is("oldest") else (node.options[-1],)
            talk(first.port, "CLUSTER", "MEET", "127.0.0.1", node.port, *bus)
        n = len(self.nodes)
        for node in self.nodes:
            await_true(lambda node=node: self._known(node) == n)
        for master, replica in zip(self.masters, self.nodes[3:], strict=False):
            name = talk(master.port, "CLUSTER", "MYID").decode()
            await_true(
                lambda r=replica, name=name: talk(r.port, "CLUSTER", "REPLICATE", name) == b"OK"
            )
        for replica in self.nodes[3:]:
            # One that has not copied its master yet never takes its place.
            await_true(lambda replica=replica: talk(replica.port, "ROLE")[3] == b"connected")
        for node in self.nodes:
            await_true(lambda node=node: self.info(node)["cluster_state"] == "ok")

    def _is(self, kind: str) -> bool:
        return self.nodes[0].kind == kind

    def _known(self, node: RedisServer) -> int:
        return int(self.info(node)["cluster_known_nodes"])

    @staticmethod
    def info(node: RedisServer) -> dict[str, str]:
        """``CLUSTER INFO``."""
        lines = talk(node.port, "CLUSTER", "INFO")
        text = lines.decode() if isinstance(lines, bytes) else ""
        if isinstance(lines, dict):
            return {str(k): str(v) for k, v in lines.items()}
        return dict(line.split(":", 1) for line in text.split())

    @property
    def url(self) -> str:
        """All masters to begin with."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{m.port}" for m in self.masters)

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.stop()


# --- Sentinel ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sentinels:
    """A master ``main``, one replica, and Sentinels of which ``quorum`` must agree."""

    servers: list[RedisServer]
    ports: list[int]
    processes: list[subprocess.Popen[bytes]]

    @classmethod
    def start(cls, directory: Path, n: int = 3) -> Sentinels:
        """Start; returns when the Sentinels know the replica and each other."""
        servers = []
        for number in range(2):
            folder = directory / f"server{number}"
            folder.mkdir(parents=True)
            server = RedisServer("newest", folder, options=("--repl-diskless-sync-delay", "0"))
            if number:
                server.options += ("--replicaof", "127.0.0.1", str(servers[0].port))
            server.start()
            servers.append(server)
        made = cls(servers, [], [])
        for number in range(n):
            made._watch(directory / f"sentinel{number}.conf", n // 2 + 1)
        for port in made.ports:
            await_true(lambda port=port: made._settled(port, n))
        return made

    def _watch(self, config: Path, quorum: int) -> None:
        port = pick_port()
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {config.parent}\n"
            f"sentinel monitor main 127.0.0.1 {self.servers[0].port} {quorum}\n"
            "sentinel down-after-milliseconds main 500\n"
            "sentinel failover-timeout main 3000\n"
        )
        command = [str(redis_binary("newest")), str(config), "--sentinel"]
        self.processes.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        self.ports.append(port)

    @staticmethod
    def _settled(port: int, n: int) -> bool:
        pairs = talk(port, "SENTINEL", "MASTERS")[0]
        if not isinstance(pairs, dict):
            pairs = dict(zip(pairs[::2], pairs[1::2], strict=False))
        state = {_text(k): _text(v) for k, v in pairs.items()}
        return state["num-slaves"] == "1" and state["num-other-sentinels"] == str(n - 1)

    @property
    def url(self) -> str:
        """As users write it; the first of the hosts is not there."""
        hosts = [f"127.0.0.1:{port}" for port in (pick_port(), *self.ports)]
        return f"redis+sentinel://{','.join(hosts)}/main"

    def stop(self) -> None:
        """End all."""
        for process in self.processes:
            end_process(process)
        for server in self.servers:
            server.stop()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- TLS -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificates:
    """A private authority, and a certificate and key for 127.0.0.1 and for a client."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    def front(self, *, ask_client: bool) -> ssl.SSLContext:
        """What a server uses."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server, self.server_key)
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.authority)
        return context


def certificates(folder: Path) -> Certificates:
    """Made with the ``openssl`` command."""

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    elliptic = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *elliptic, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        run(
            "req",
            *elliptic,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-out", f"{name}.crt", "-extfile", "names"),
        )
    names = ("ca.crt", "server.crt", "server.key", "client.crt", "client.key")
    return Certificates(*(folder / name for name in names))
