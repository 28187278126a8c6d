"""The composition root: the only place that picks implementations and wires them.

config -> router (index, policies) <- feeds
             ^
app -> pipeline -> upstream          admin -> router, feeds, registry
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from random import Random
from secrets import token_hex

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from gateway.accesslog import open_access_log
from gateway.admin import Admin
from gateway.app import App, Readiness
from gateway.approved import read_approved
from gateway.asked import Asking
from gateway.bundles import WorkerBundles
from gateway.config import GatewayConfig
from gateway.dashboard.live import Live
from gateway.dashboard.pages import Dashboard
from gateway.dashboard.recent import Recent
from gateway.discovery.allowed import Reachable
from gateway.feedmetrics import FeedCollector
from gateway.feeds import Feeds
from gateway.foster import Foster
from gateway.gate import Gate
from gateway.httpserver import HttpServer, base_url, bound_port
from gateway.index import backends
from gateway.index.table import PrefixTable
from gateway.inherited import Inherited, number_of, shown_by
from gateway.openers import (
    admin_tls,
    check_config,
    open_givers,
    open_ledger,
    open_limiter,
    open_samples,
    open_stream,
    open_tenants,
    open_trace,
    open_tracing,
    open_upstream,
    public_tls,
    report_of,
    unfit_for,
)
from gateway.owntokens import PromptTokens
from gateway.parts import Parts
from gateway.pipeline import Pipeline
from gateway.plugins import all_policies
from gateway.prompts import Prompts
from gateway.readiness import ReadyWatch
from gateway.reload import Changes, compare
from gateway.router import Router
from gateway.tally import WorkerTally
from gateway.telemetry import FleetCollector, PrometheusSink, RecordSink
from gateway.tenancy import Meters
from gateway.trust import TrustChange
from gateway.upstream import Timeouts
from gateway.wire.server import WireServer
from shared.errors import ConfigError
from shared.logs import set_level
from shared.tls import load_pair

CUT_S = 2.0
"""After the time to drain, how long clients have to take their error event."""


class Gateway:
    """One gateway: two listeners and what is behind them."""

    def __init__(self, config: GatewayConfig, inherited: Inherited | None = None) -> None:
        """Wire all parts; needs a running event loop.

        :param inherited: the sockets, where it is one of several processes on a port.
        :raises ConfigError: the configuration cannot work.
        """
        check_config(config)
        self._config, self._inherited = config, inherited
        self._log = structlog.get_logger("headwater.gateway")
        rng = Random()
        self._index = index = PrefixTable(config.routing.index_max_blocks, rng)
        self._tasks: list[asyncio.Task[None]] = []
        self._tls, self._admin_tls = public_tls(config.listen), admin_tls(config.listen)
        self.router = Router(
            index,
            all_policies(config.routing),
            config.routing,
            rng,
            time.monotonic,
            on_trust=self._trust_changed,
        )
        self._ledger = open_ledger(config, number_of(inherited))
        self._stream = open_stream(config)
        self._trace = open_trace(config, number_of(inherited))
        self._spans, self._samples = (
            open_tracing(config),
            open_samples(config, number_of(inherited)),
        )
        self.upstream = open_upstream(config, reachable := Reachable())
        timeouts = Timeouts(config.workers.connect_timeout_s, config.workers.idle_timeout_s)
        bundles = WorkerBundles(self.router, self.upstream, timeouts, config.workers.api_key)
        self.prompts = Prompts(
            config.render,
            config.deployment.hash_key,
            bundles,
            read_approved(config.tenancy.shared_prompts),
            shown=shown_by(inherited),
        )
        self.feeds = Feeds(
            self.router,
            config,
            gateway_id=f"gw-{token_hex(8)}",
            own_tokens=PromptTokens(self.prompts),
            reachable=reachable,
        )
        self._watch = ReadyWatch(self.router, self.feeds, self.prompts)
        self.registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # missing in the library
        ProcessCollector(registry=self.registry)
        gate = Gate(config.admission, time.monotonic)
        self.registry.register(FeedCollector(self.feeds.stats))
        self.registry.register(
            FleetCollector(
                self.router,
                self.feeds.stats,
                outsiders=self.feeds.outsiders,
                lists=self.feeds.lists,
                queued=gate.queue.depths,
            )
        )
        metrics = PrometheusSink(
            self.registry,
            known=lambda model: self.router.profile(model) is not None,
            here=self.router.has,
        )
        tally, live, recent = WorkerTally(), Live(time.monotonic), Recent()
        sinks: list[RecordSink] = [metrics, tally, live]
        if self._ledger is not None:
            sinks.append(self._ledger)
        if self._stream is not None:
            sinks.append(self._stream)
        self._meters, self._tenants = Meters(), open_tenants(config)
        self._limiter, self._givers = open_limiter(config, self._meters), open_givers(config)
        self._keep_out_unfit(config)
        self.pipeline = Pipeline(
            Parts(
                router=self.router,
                prompts=self.prompts,
                upstream=self.upstream,
                metrics=metrics,
                sinks=sinks,
                config=config,
                tenants=self._tenants,
                limiter=self._limiter,
                givers=self._givers,
                traces=[recent.keep, *([self._trace.record] if self._trace is not None else [])],
                suspect=self.feeds.suspect,
                gate=gate,
                spans=self._spans,
                sample=None if self._samples is None else self._samples.offer,
                recalling=self.feeds.book.recalling,
            )
        )
        self._access = open_access_log(config.log)
        self.app = App(
            config.listen,
            self.pipeline,
            self.router,
            metrics,
            self.readiness,
            self._access,
            self._tenants,
        )
        report = report_of(config.ledger, self._ledger.flush) if self._ledger is not None else None
        self._public = WireServer(self.app.handle, self._tls)
        self._foster = Foster(self._public, inherited) if inherited is not None else None
        self.admin = Admin(
            config,
            self.router,
            Asking(config, self.router, self.prompts, self._tenants, self._givers.giver),
            self.feeds,
            self.registry,
            report,
            Dashboard(self.router, tally, live, recent),
        )
        self.admin.internal = self._foster.routes(self._ledger) if self._foster is not None else {}
        self._listeners: dict[str, tuple[HttpServer | WireServer, list[asyncio.Server]]] = {}

    def tell_of_config(self, notes: Callable[[], Sequence[str]]) -> None:
        """What ``/ready`` is to say about the configuration."""
        self._watch.config_notes = notes

    @property
    def url(self) -> str:
        """Base URL of the public listener, once started."""
        listeners = self._listeners["listen.port"][1]
        port = bound_port(listeners[0]) if listeners else self._config.listen.port
        return base_url(self._config.listen.host, port, tls=self._tls is not None)

    @property
    def admin_url(self) -> str:
        """Base URL of the admin listener, once started."""
        listener = self._listeners["listen.admin_port"][1][0]
        tls = self._tls is not None and self._inherited is None
        return base_url(self._config.listen.admin_host, bound_port(listener), tls=tls)

    async def start(self) -> None:
        """Listen and begin to look for workers; waits for nobody.

        :raises ConfigError: a port is taken.
        """
        listen, given = self._config.listen, self._inherited
        if given is not None:
            self._listeners["listen.port"] = (self._public, [])  # when the parent says so
            admin = HttpServer(self.admin.handle)  # of the parent alone, on loopback
            listening = await admin.listen_on(given.taken(given.admin))
            self._listeners["listen.admin_port"] = (admin, [listening])
        else:
            admin = HttpServer(self.admin.handle, self._admin_tls)
            await self._bind("listen.port", self._public, listen.host, listen.port)
            await self._bind("listen.admin_port", admin, listen.admin_host, listen.admin_port)
        await self.observe()

    async def observe(self) -> None:
        """Begin to look for workers, without listening."""
        self._tasks = [
            asyncio.create_task(self.prompts.watch(self.router), name="prompts"),
            asyncio.create_task(backends.grow(self._index), name="index"),
        ]
        self._limiter.start()
        self._givers.start()
        self.feeds.on_silent = self.pipeline.give_up
        await self.feeds.start()

    async def _bind(self, key: str, server: HttpServer | WireServer, host: str, port: int) -> None:
        try:
            self._listeners[key] = (server, [await server.listen(host, port)])
        except OSError as error:
            # asyncio puts a sentence of its own around what the system said
            code = error.errno or 0
            known = os.strerror(code) if code > 0 else error.strerror
            raise ConfigError(key, port, f"cannot listen on {host}: {known or error}") from error

    def readiness(self) -> Readiness:
        """For ``/ready``."""
        return self._watch.look(isolating=self._tenants.isolating)

    async def reload(self, wanted: GatewayConfig) -> Changes:
        """Take over what a running gateway can of another configuration.

        :raises ConfigError: no gateway could start with it; nothing has changed.
        """
        check_config(wanted)
        changes = compare(self._config, wanted)
        config = changes.config
        check_config(config)
        if changes.touches("routing."):
            self.router.reconfigure(all_policies(config.routing), config.routing)
        if changes.touches("log."):
            set_level(config.log)
            self._access.close()
            self._access = open_access_log(config.log)
        self._config = config
        for context in (self._tls, self._admin_tls):
            if context is not None:
                load_pair(context, "listen", config.listen.tls_cert, config.listen.tls_key)
        self._tenants = open_tenants(config)
        await self.prompts.approve(read_approved(config.tenancy.shared_prompts))
        self._limiter.away = config.tenancy.without_redis
        self._keep_out_unfit(config)
        self.pipeline.reconfigure(config, self._tenants)
        self.app.reconfigure(config.listen, self._access, self._tenants)
        self.admin.asking.tenants = self._tenants
        if changes.touches("workers."):
            self.feeds.replace_static(config.workers)
        if changes.touches("discovery."):
            await self.feeds.replace_lists(config.discovery)
        return changes

    def _keep_out_unfit(self, config: GatewayConfig) -> None:
        unfit = unfit_for(config, self._tenants)
        self.router.accept(lambda info: unfit(info.engine))

    def _trust_changed(self, change: TrustChange) -> None:
        log = self._log.info if change.raised else self._log.warning
        log("worker_trust", worker=change.worker, trust=str(change.after), reason=change.reason)

    async def until_ready(self) -> None:
        """Wait for workers that can take requests, and a moment for their tokenizers."""
        await self._watch.until_ready()

    async def drain(self) -> None:
        """Turn new requests away; wait for running ones; end those that take too long."""
        self.app.draining = True
        self._log.info("draining", running=self.app.busy, drain_s=self._config.listen.drain_s)
        await self._until_idle(self._config.listen.drain_s)
        if self.app.busy:
            self._log.warning("drain_time_over", running=self.app.busy)
            self.pipeline.abort_all()
            await self._until_idle(CUT_S)

    async def _until_idle(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self.app.idle.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Stop everything, however far ``start`` came."""
        for task in self._tasks:
            task.cancel()
        if self._foster is not None:
            self._foster.close()
        for server, listeners in self._listeners.values():
            for listener in listeners:
                listener.close()
            await server.shutdown(0.5)
        await self.feeds.stop()
        await self._limiter.close()
        await self._givers.close()
        await self.prompts.close()
        await self.upstream.close()
        self._access.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)
        if self._stream is not None:
            await asyncio.to_thread(self._stream.close)
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)
        if self._samples is not None:
            await asyncio.to_thread(self._samples.close)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
