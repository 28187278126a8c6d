"""What a gateway's configuration makes it open, and what no gateway could start with."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from random import Random
from secrets import token_hex

from gateway.admin import Report, check_token
from gateway.approved import read_approved
from gateway.config import GatewayConfig, LedgerConfig, ListenConfig, WorkersConfig
from gateway.discovery.allowed import CheckedResolver, Reachable
from gateway.discovery.static import static_listing
from gateway.engines.catalogue import AUTO
from gateway.feeds.sources import make_sources
from gateway.givers import Givers
from gateway.keysfile import default_limits, read_keys
from gateway.ledger import LedgerSink
from gateway.ledgerstream import LedgerStream
from gateway.plugins import all_policies
from gateway.samples import SampleSink
from gateway.sharedlimits import Limiter
from gateway.spans import Tracing
from gateway.tenancy import Meters, Tenant, Tenants, cannot_isolate, plain_keys
from gateway.tracesink import TraceSink
from gateway.upstream import Upstream
from gateway.upstream_aiohttp import AiohttpUpstream
from gateway.wire.client import WireUpstream
from shared import redisurl
from shared.errors import ConfigError, InternalError, NotFound
from shared.rediskeys import RedisKeys
from shared.redislink import RedisLink
from shared.spans import open_export
from shared.tls import client_context, server_context


def check_config(config: GatewayConfig) -> None:
    """Raise ``ConfigError`` for what no gateway could start with; opens and asks nothing."""
    check_token(config)
    public_tls(config.listen)
    worker_tls(config.workers)
    all_policies(config.routing)
    static_listing(config.workers)
    _check_engines(config)
    read_approved(config.tenancy.shared_prompts)
    make_sources(config.discovery, clock=time.monotonic, rng=Random())
    if config.ledger.decisions and not config.ledger.trace:
        raise ConfigError("ledger.decisions", True, "needs [ledger] trace, beside which they lie")
    if config.ledger.trace and not config.ledger.dir:
        raise ConfigError("ledger.trace", True, "needs [ledger] dir, where its folder lies")
    if config.ledger.samples_per_minute and not config.ledger.dir:
        reason = "needs [ledger] dir, where their folder lies"
        raise ConfigError("ledger.samples_per_minute", config.ledger.samples_per_minute, reason)
    if config.redis.url != "none":
        redisurl.check(config.redis.url)
    if config.ledger.stream_records:
        if config.redis.url == "none":
            raise ConfigError("ledger.stream_records", config.ledger.stream_records, "needs Redis")
        if not config.deployment.secret:
            reason = "needs [deployment] secret, which keys its hashes in all gateways alike"
            raise ConfigError("ledger.stream_records", config.ledger.stream_records, reason)


def open_tenants(config: GatewayConfig) -> Tenants:
    """Who may ask.

    :raises ConfigError: the file of keys makes no sense.
    """
    isolate = config.tenancy.isolation == "auto"
    keys = _all_keys(config)
    return Tenants(keys, config.deployment.hash_key, isolate=isolate)


def _check_engines(config: GatewayConfig) -> None:
    """Engines that are named already; others are kept out when they have said what they are."""
    unfit = unfit_for(config, open_tenants(config))
    named = [(one.engine, one.url) for one in config.workers.static]
    if config.workers.urls:
        named.append((config.workers.engine, config.workers.urls[0]))
    for make, url in named:
        why = "" if make == AUTO else unfit(make)
        if why:
            reason = f"{why}; [tenancy] unisolated = 'allow' lets them"
            raise ConfigError("tenancy.unisolated", url, reason)


def unfit_for(config: GatewayConfig, tenants: Tenants) -> Callable[[str], str]:
    """Why an engine, by its name, must not serve these tenants; empty if it may."""
    if config.tenancy.unisolated == "allow" or not tenants.apart:
        return lambda make: ""
    return cannot_isolate


def open_limiter(config: GatewayConfig, meters: Meters) -> Limiter:
    """What lets requests in, counted in Redis if there is one."""
    redis, link = config.redis, None
    if redis.url != "none":
        link = RedisLink(redis.url, redis.timeout_ms / 1000, "headwater-limits")
    keys, name = RedisKeys(config.deployment.name), token_hex(8)
    away = config.tenancy.without_redis
    return Limiter(meters, link, keys, name, away=away, clock=time.monotonic, rng=Random())


def open_givers(config: GatewayConfig) -> Givers:
    """What knows which worker gave a response, shared through Redis if there is one."""
    redis, link = config.redis, None
    if redis.url != "none":
        link = RedisLink(redis.url, redis.timeout_ms / 1000, "headwater-givers")
    return Givers(link, RedisKeys(config.deployment.name))


def _all_keys(config: GatewayConfig) -> dict[bytes, Tenant]:
    """Of both lists. Salts and limits go by name, so no name may stand for two tenants."""
    plain = plain_keys(config.listen.api_keys, default_limits(config.tenancy))
    named = read_keys(config.tenancy)
    twice = {one.name for one in plain.values()} & {one.name for one in named.values()}
    if twice:
        reason = f"tenant '{min(twice)}' is the name of a key in listen.api_keys: choose another"
        raise ConfigError("tenancy.keys_file", config.tenancy.keys_file, reason)
    return plain | named


def open_upstream(config: GatewayConfig, reachable: Reachable) -> Upstream:
    """What calls workers."""
    tls = worker_tls(config.workers)
    if config.workers.http_client == "aiohttp":
        return AiohttpUpstream(tls, CheckedResolver(reachable))
    return WireUpstream(tls, allows=reachable.allows)


def public_tls(listen: ListenConfig) -> ssl.SSLContext | None:
    """Of the public listener; None: plain. Raises ``ConfigError``."""
    return server_context("listen", listen.tls_cert, listen.tls_key, listen.tls_client_ca)


def admin_tls(listen: ListenConfig) -> ssl.SSLContext | None:
    """Of the admin listener, whose clients have a token; None: plain. Raises ``ConfigError``."""
    return server_context("listen", listen.tls_cert, listen.tls_key, "")


def worker_tls(config: WorkersConfig) -> ssl.SSLContext | None:
    """Of calls to https workers; None: as the system has it. Raises ``ConfigError``."""
    return client_context("workers", config.tls_ca, config.tls_cert, config.tls_key)


def open_tracing(config: GatewayConfig) -> Tracing | None:
    """The export of spans, if a collector is named."""
    export = open_export(config.telemetry.otlp_endpoint, "headwater-gateway")
    return None if export is None else Tracing(export, Random(), config.telemetry.sample)


def open_ledger(config: GatewayConfig, process: int | None = None) -> LedgerSink | None:
    """The ledger's files are named by the port, so that a restarted gateway goes on in its own.

    :param process: number of this process among those on the port; None: it is the only one.
    """
    if not config.ledger.dir:
        return None
    instance = _instance(config, process)
    return LedgerSink(config.ledger, instance, secret=config.deployment.secret.encode())


def open_stream(config: GatewayConfig) -> LedgerStream | None:
    """The records of all gateways in Redis, if that was asked for."""
    if not config.ledger.stream_records:
        return None
    return LedgerStream(
        config.redis.url,
        config.deployment.name,
        config.deployment.secret.encode(),
        config.ledger.stream_records,
        timeout_s=config.redis.timeout_ms / 1000,
    )


def open_trace(config: GatewayConfig, process: int | None = None) -> TraceSink | None:
    """The hash chains that replay needs, if that was asked for."""
    if not config.ledger.trace:
        return None
    instance = _instance(config, process)
    return TraceSink(config.ledger, instance, secret=config.deployment.secret.encode())


def open_samples(config: GatewayConfig, process: int | None = None) -> SampleSink | None:
    """Some requests' own text, if that was asked for."""
    if not config.ledger.samples_per_minute:
        return None
    return SampleSink(config.ledger, _instance(config, process))


def _instance(config: GatewayConfig, process: int | None) -> str:
    port = str(config.listen.port or token_hex(4))
    return port if process is None else f"{port}-{process}"


def report_of(config: LedgerConfig, flush: Callable[[], None] = lambda: None) -> Report:
    """What ``GET /admin/report`` answers with.

    :param flush: writes what has not reached the files yet.
    """

    def report() -> bytes:
        # Imported on first use: it brings in DuckDB, which a gateway at work never needs.
        from gateway.report import EmptyLedger, LedgerError, summarise, to_json

        flush()
        try:
            return to_json(summarise([config.dir])).encode()
        except EmptyLedger:
            raise NotFound("The ledger holds no record yet.") from None
        except LedgerError as error:
            raise InternalError(f"The ledger cannot be summed up: {error}") from error

    return report
