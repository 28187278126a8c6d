"""The process that starts the others, keeps their sockets, and answers for them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_bytes, token_urlsafe
from socket import socket
from typing import Any

import structlog

from gateway.cluster.child import EXIT_CONFIG, Child, ChildFailed, ChildSpec
from gateway.cluster.redisserver import server_spec
from gateway.cluster.supervisor import Supervisor
from gateway.config import GatewayConfig
from gateway.httpserver import HttpServer, base_url, bound_port
from gateway.inherited import Inherited
from gateway.openers import admin_tls, check_config, report_of
from gateway.processes.calls import Calls
from gateway.processes.child import VARIABLE, Order, encode
from gateway.processes.front import Front
from gateway.processes.group import Group
from gateway.processes.sockets import open_admin, open_public, port_of
from shared.errors import ConfigError
from shared.shownpieces import LEAST_AREA, make_area_file

CUT_S = 10.0
"""Beyond the time to drain, how long a process may take to end."""
EXIT_AT_ONCE = 130
_SHOWN_SHARE = 8
"""Of the memory for segments that each process may have, so much again is shown to the others."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the configuration comes from: what each process reads, too."""

    read: Callable[[], GatewayConfig]
    path: Path | None
    flags: Mapping[str, Any]


class Processes:
    """``say`` takes lines for whoever started us. Use it once."""

    def __init__(self, config: GatewayConfig, origin: Origin, say: Callable[[str], None]) -> None:
        self._config, self._origin, self._say = config, origin, say
        self._supervisor = Supervisor(lambda text: self._log.warning("process", note=text))
        self._log: Any = structlog.get_logger("headwater.gateway")
        self._token = token_urlsafe(24)
        self._secret = token_bytes(32)
        self._children: list[Child] = []
        self._group: Group
        self._url = ""
        self._is_ready = False

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit code. Raises ``ConfigError``."""
        config, listen = self._config, self._config.listen
        check_config(config)
        if sys.platform != "linux":
            raise ConfigError("listen.processes", listen.processes, "needs Linux")
        public = open_public(listen.host, listen.port, listen.processes)
        pieces = make_area_file(listen.processes, _area_bytes(config))
        self._url = base_url(listen.host, port_of(public), tls=bool(listen.tls_cert))
        admins = [open_admin() for _ in public]
        urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in admins]
        group = self._group = Group(Calls(urls, self._token), lambda: self._children)
        report = report_of(config.ledger) if config.ledger.dir else None
        server = HttpServer(Front(listen.admin_token, group, report).handle, admin_tls(listen))
        self._supervisor.watch_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        tending: asyncio.Task[None] | None = None
        try:
            with tempfile.TemporaryDirectory(prefix="headwater-") as folder, ExitStack() as ended:
                try:
                    listener = await self._listen(server)
                    ended.callback(listener.close)
                    redis_url = await self._redis(Path(folder))
                    tending = asyncio.create_task(group.run(), name="processes")
                    await self._start(self._specs(public, admins, pieces, redis_url))
                    await self._supervisor.until(tending.done)
                except ChildFailed as failure:
                    return self._failed(failure)
                finally:
                    await self._stop()
        finally:
            if tending is not None:
                tending.cancel()
            await group.close()
            await server.shutdown(0.5)
            for sock in (*admins, *(sock for mine in public for sock in mine)):
                sock.close()
            os.close(pieces)
        return EXIT_AT_ONCE if self._supervisor.killed else 0

    async def _listen(self, server: HttpServer) -> asyncio.Server:
        listen = self._config.listen
        try:
            listener = await server.listen(listen.admin_host, listen.admin_port)
        except OSError as error:
            reason = f"cannot listen on {listen.admin_host}: {error.strerror}"
            raise ConfigError("listen.admin_port", listen.admin_port, reason) from error
        url = base_url(listen.admin_host, bound_port(listener), tls=bool(listen.tls_cert))
        self._log.info("admin", url=url)
        return listener

    async def _redis(self, folder: Path) -> str:
        """What the processes share; a server of their own where none was named."""
        url = self._config.redis.url
        if url != "none":
            return url
        try:
            spec, url = server_spec(folder, folder / "redis.log")
        except ConfigError as error:
            reason = (
                f"{self._config.listen.processes} processes share what they know through Redis, "
                "and there is no redis-server to start: name one with --redis, install one, or "
                "`pip install headwater[redis-server]`"
            )
            raise ConfigError("redis.url", "none", reason) from error
        await self._supervisor.start([spec], wait=True)
        self._say("redis is none: the processes share a private redis-server, which ends with them")
        return url

    def _specs(
        self, public: list[list[socket]], admins: list[socket], pieces: int, redis_url: str
    ) -> list[ChildSpec]:
        fds = tuple(tuple(sock.fileno() for sock in mine) for mine in public)
        specs = []
        for number, admin in enumerate(admins):
            flags = {
                **{key: value for key, value in self._origin.flags.items() if value is not None},
                "listen.processes": 1,
                "listen.port": port_of(public),
                "listen.admin_host": "127.0.0.1",
                "listen.admin_port": admin.getsockname()[1],
                "listen.admin_token": self._token,
                "redis.url": redis_url,
            }
            path = None if self._origin.path is None else str(self._origin.path)
            inherited = Inherited(number, fds, admin.fileno(), pieces, self._secret)
            order = Order(path, flags, inherited)
            specs.append(
                ChildSpec(
                    f"process {number}",
                    (sys.executable, "-P", "-m", "gateway.processes.child"),
                    log=None,
                    env={VARIABLE: encode(order)},
                    stop_s=self._stop_s,
                    heard=partial(self._heard, number),
                    inherits=(*(fd for mine in fds for fd in mine), admin.fileno(), pieces),
                    gives_up=False,
                )
            )
        return specs

    async def _start(self, specs: list[ChildSpec]) -> None:
        """The first alone: what is wrong with the configuration is told once, by one."""
        await self._start_some(specs[:1])
        await self._supervisor.until(lambda: self._group.accepts(0))
        if not self._supervisor.leaving:
            self._say(f"listening {self._url}")
            await self._start_some(specs[1:])
        if not self._supervisor.leaving:
            self._log.info("processes_up", processes=len(specs))

    async def _start_some(self, specs: list[ChildSpec]) -> None:
        starting = asyncio.create_task(self._supervisor.start(specs, wait=True))
        await asyncio.sleep(0)  # it has made them
        self._children = [c for c in self._supervisor.children if c.spec.heard is not None]
        await starting

    def _heard(self, number: int, text: str) -> bool:
        """A line of a process: that it listens, and that it can serve, are told once for all."""
        word, _, url = text.partition(" ")
        if word == "ready":
            self._group.can_serve(number)
            if not self._is_ready:
                self._is_ready = True
                self._say(f"ready {url}")
        return word == "listening"

    def _on_hangup(self) -> None:
        """Each reads the configuration again; one that is just starting has it already."""
        for child in self._children:
            if child.is_ready.is_set():
                child.signal(signal.SIGHUP)

    def _stop_s(self) -> float:
        """The time to drain may have been changed since the start."""
        try:
            drain_s = self._origin.read().listen.drain_s
        except ConfigError:
            drain_s = 0.0
        return max(drain_s, self._config.listen.drain_s) + CUT_S

    async def _stop(self) -> None:
        """All processes at once; those that are left answer on the sockets of those that ended."""
        await asyncio.gather(*(child.stop() for child in self._children))
        await self._supervisor.stop()

    def _failed(self, failure: ChildFailed) -> int:
        if failure.code != EXIT_CONFIG:  # a mistake in the configuration was told by the process
            sys.stderr.write(f"headwater: {failure}\n")
        return failure.code


def _area_bytes(config: GatewayConfig) -> int:
    """Of one process's part of the memory in which they show each other what they encoded."""
    return max(LEAST_AREA, int(config.render.cache_mib * 2**20 / _SHOWN_SHARE) // 8 * 8)


def run(config: GatewayConfig, origin: Origin, say: Callable[[str], None]) -> int:
    """Serve with several processes; the exit code. Raises ``ConfigError``."""

    async def serve() -> int:
        return await Processes(config, origin, say).run()

    return asyncio.run(serve())
