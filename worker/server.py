"""The worker's life: listen, load, serve, drain, leave.

Listeners open before the model is loaded, so a supervisor sees a live process at once and a client
gets a 503 that says why. SIGTERM drains; a second one leaves at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from random import Random
from typing import TypeVar, cast

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from shared.errors import ConfigError
from shared.spans import open_export
from shared.tls import server_context
from shared.types import WorkerId
from worker.admin import admin_app, check_exposure
from worker.build import (
    Model,
    adapter_folders,
    assemble,
    check_cache,
    check_model,
    check_redis,
    load_model,
    served_names,
)
from worker.config import WorkerConfig
from worker.eventlog import EventLog
from worker.httpserver import runner_of
from worker.publish import RedisPublisher
from worker.reach import unreachable
from worker.routes_generate import GenerateRoutes
from worker.routes_meta import MetaRoutes
from worker.routes_native import NativeRoutes
from worker.service import Loaded, Service
from worker.tracing import closing, traced
from worker.web import echo_request_id, errors_as_json, require_bearer

OPEN_PATHS = ("/health", "/ready", "/metrics")
"""What needs no key."""
LAST_WRITES_S = 2.0
"""After the drain, how long a response may take to write what it already has."""
BACKLOG = 1024
EXIT_SECOND_SIGNAL = 128 + signal.SIGTERM
WILDCARDS = ("", "0.0.0.0", "::")

T = TypeVar("T")


class WorkerServer:
    """One worker process."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        load: Callable[[WorkerConfig], Model] = load_model,
        announce: Callable[[str], None],
    ) -> None:
        check_exposure(config.serve)
        check_redis(config.redis.url)
        check_model(config.model)
        adapter_folders(config)
        check_cache(config)
        self._config, self._load, self._announce = config, load, announce
        self._service = Service(config, served_names(config), clock=time.monotonic, wall=time.time)
        self._spans = open_export(config.telemetry.otlp_endpoint, "headwater-worker")
        self.loading = False
        """A thread that cannot be stopped loads the model."""
        self._stopping = asyncio.Event()
        self._runners: list[web.ServerRunner] = []
        self._log = structlog.get_logger("worker.server")

    async def run(self) -> int:
        """Serve until a signal; returns the exit code. Raises ``ConfigError``."""
        self._watch_signals()
        try:
            port, admin_port = await self._listen()
            self.loading = True
            model = await self._until_stopped(in_thread(self._load, self._config))
            self.loading = model is None
            if model is not None:
                await self._serve(model, port, admin_port)
        finally:
            for runner in self._runners:
                await runner.cleanup()
        return 0

    async def _serve(self, model: Model, port: int, admin_port: int) -> None:
        serve = self._config.serve
        host = socket.gethostname() if serve.host in WILDCARDS else serve.host
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        scheme = "https" if serve.tls_cert else "http"
        url = serve.advertise_url or f"{scheme}://{place}"
        worker = WorkerId(serve.worker_id or place)
        loaded, log, publisher = assemble(self._service, model, worker, url)
        self._service.become_ready(loaded, log)
        if publisher is not None:
            warning = unreachable(url, self._config.redis.url)
            if warning:
                self._log.warning("address_of_no_use", url=url, reason=warning)
                self._announce(f"warning: {warning}")
            self._service.redis_up = lambda: publisher.up
            publisher.start()
        self._log.info("ready", worker=worker, url=url, admin_port=admin_port)
        self._announce(f"ready {scheme}://{place} model={self._service.names[0]}")
        await self._stopping.wait()
        await self._drain(loaded, log, publisher)

    async def _drain(self, loaded: Loaded, log: EventLog, publisher: RedisPublisher | None) -> None:
        self._log.info("draining", running=loaded.engine.load().running)
        self._service.drain()
        await loaded.engine.stop(self._config.serve.drain_s)
        if publisher is not None:
            await publisher.close()
        log.close()
        self._log.info("stopped")

    async def _listen(self) -> tuple[int, int]:
        """Open both listeners; returns their ports."""
        serve = self._config.serve
        tls = server_context("serve", serve.tls_cert, serve.tls_key, serve.tls_client_ca)
        admin_tls = server_context("serve", serve.tls_cert, serve.tls_key, "")
        port = await self._open(self._public_app(), serve.host, serve.port, "serve.port", tls)
        admin = admin_app(self._service)
        where = serve.admin_host, serve.admin_port, "serve.admin_port"
        admin_port = await self._open(admin, *where, admin_tls)
        self._log.info("listening", host=serve.host, port=port, admin_port=admin_port)
        return port, admin_port

    def _public_app(self) -> web.Application:
        serve = self._config.serve
        middlewares: list[Middleware] = [errors_as_json]
        if self._spans is not None:
            middlewares.insert(0, traced(self._spans, Random()))
        if serve.api_keys:
            middlewares.append(require_bearer(serve.api_keys, OPEN_PATHS))
        limit = int(serve.max_body_mib * (1 << 20))
        app = web.Application(client_max_size=limit, middlewares=middlewares)
        app.on_response_prepare.append(echo_request_id)
        if self._spans is not None:
            app.on_cleanup.append(closing(self._spans))
        MetaRoutes(self._service, limit).add_to(app)
        NativeRoutes(self._service).add_to(app)
        GenerateRoutes(self._service, limit).add_to(app)
        return app

    async def _open(
        self, app: web.Application, host: str, port: int, key: str, tls: ssl.SSLContext | None
    ) -> int:
        runner = await runner_of(app, LAST_WRITES_S)
        self._runners.append(runner)
        site = web.TCPSite(runner, host or None, port, backlog=BACKLOG, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            # asyncio puts a sentence of its own around what the system said
            code = error.errno or 0
            known = os.strerror(code) if code > 0 else error.strerror
            raise ConfigError(key, port, f"cannot listen on {host}: {known or error}") from None
        return int(runner.addresses[0][1])

    async def _until_stopped(self, work: asyncio.Future[T]) -> T | None:
        """The result of ``work``; None if a signal comes first."""
        stopped = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return work.result() if work.done() else None

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            os._exit(EXIT_SECOND_SIGNAL)
        self._stopping.set()
        self._service.drain()


def in_thread(function: Callable[[WorkerConfig], T], config: WorkerConfig) -> asyncio.Future[T]:
    """``function(config)`` in a daemon thread: a signal during a long load must not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", value))

    def work() -> None:
        value, failed = None, None
        try:
            value = function(config)
        except Exception as error:  # noqa: BLE001 - raised again where the future is awaited
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, name="load-model", daemon=True).start()
    return future


def announce(line: str) -> None:
    """One line on stdout, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
