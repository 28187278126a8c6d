"""Redis addresses: what may be written, checked before anything starts, shown without secrets.

redis://[[user]:password@]host[:port][/db]     one server, or any node of a Cluster
rediss://...                                   the same over TLS
unix:///path
redis+cluster://host:port,host2:port           several nodes of a Cluster to begin with
redis+sentinel://host:port,host2:port/master   the master of that name, as the Sentinels say
rediss+cluster://..., rediss+sentinel://...    over TLS
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qs, unquote

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.errors import ConfigError

FORM = (
    "must look like redis://[[user]:password@]host[:port][/db] (or rediss://, unix://, "
    "redis+cluster://host:port,host:port, redis+sentinel://host:port,host:port/master), with no "
    "option that the client does not know; special characters of a password as %XX"
)
SENTINEL_PORT = 26379
REDIS_PORT = 6379


class Kind(StrEnum):
    """What answers at the address."""

    SERVER = "server"
    """One server; it may turn out to be a node of a Cluster."""
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


@dataclass(frozen=True, slots=True)
class Host:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL: where to begin, and how to connect to whatever is found from there."""

    kind: Kind
    hosts: tuple[Host, ...]
    """Where to begin; empty for a Unix socket."""
    master: str
    """Name of the master that Sentinels are asked for."""
    connection_class: type[AbstractConnection]
    options: Mapping[str, Any] = field(repr=False)
    """For ``connection_class``; without host and port."""
    sentinel_options: Mapping[str, Any] = field(repr=False)

    def connection(self, host: Host | None, timeout_s: float) -> AbstractConnection:
        """A new connection, not yet connected; ``host``: another one than the URL names."""
        return self._make(self.options, host, timeout_s)

    def sentinel(self, host: Host, timeout_s: float) -> AbstractConnection:
        """A new connection to a Sentinel."""
        return self._make(self.sentinel_options, host, timeout_s)

    def _make(
        self, options: Mapping[str, Any], host: Host | None, timeout_s: float
    ) -> AbstractConnection:
        place = {} if host is None else {"host": host.host, "port": host.port}
        connection = self.connection_class(
            **{
                **options,
                **place,
                "socket_connect_timeout": timeout_s,
                "retry": Retry(NoBackoff(), 0),
            }
        )
        # Whoever calls has a deadline for the whole exchange. With one of its own, redis-py sends
        # by asyncio.wait_for, which until Python 3.12 can swallow a cancellation.
        connection.socket_timeout = None
        return connection


def shown(url: str) -> str:
    """The address as a message may show it: without user, password and options."""
    scheme, separator, rest = url.rpartition("://")
    _, at, place = rest.rpartition("@")
    hidden = "***@" if at else ""
    return f"{scheme}{separator}{hidden}{place.partition('?')[0]}"


def check(url: str) -> None:
    """Raise ``ConfigError`` for an address that no connection could be made from; makes none."""
    parse(url)


def parse(url: str) -> Address:
    """Read an address.

    :raises ConfigError: no connection could be made from it. The client's own message is not
        repeated: it may quote a piece of the password.
    """
    try:
        address = _parse(url)
        address.connection(None, 1.0)
    except (ValueError, TypeError, LookupError, RedisError):
        raise ConfigError("redis.url", shown(url), FORM) from None
    return address


def _parse(url: str) -> Address:
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError("no scheme")
    base, plus, what = scheme.partition("+")
    if not plus:
        connection_class, options = _client_options(url)
        host = options.get("host", "localhost")
        place = () if "path" in options else (Host(host, options.get("port", REDIS_PORT)),)
        return Address(Kind.SERVER, place, "", connection_class, _placeless(options), {})
    if base not in {"redis", "rediss"} or not separator:
        raise ValueError("unknown scheme")
    kind = {"cluster": Kind.CLUSTER, "sentinel": Kind.SENTINEL}[what]
    location, _, query = rest.partition("?")
    places, _, path = location.partition("/")
    credentials, at, names = places.rpartition("@")
    master, _, database = path.partition("/") if kind is Kind.SENTINEL else ("", "", path)
    if kind is Kind.SENTINEL and not master:
        raise ValueError("no name of a master")
    if kind is Kind.CLUSTER and database not in {"", "0"}:
        raise ValueError("a Cluster has no database but 0")
    default = SENTINEL_PORT if kind is Kind.SENTINEL else REDIS_PORT
    hosts = tuple(_host(name, default) for name in names.split(","))
    own, of_sentinel = _split_query(query)
    connection_class, options = _client_options(f"{base}://{credentials}{at}x/{database}{own}")
    _, watching = _client_options(f"{base}://x/{own}")
    return Address(
        kind,
        hosts,
        unquote(master),
        connection_class,
        _placeless(options),
        {**_placeless(watching), **of_sentinel},
    )


def _client_options(url: str) -> tuple[type[AbstractConnection], dict[str, Any]]:
    pool = ConnectionPool.from_url(url, protocol=2, driver_info=None)
    return pool.connection_class, pool.connection_kwargs


def _placeless(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is set for each connection; a URL option must not lift a time limit."""
    drop = {"socket_timeout", "socket_connect_timeout", "retry", "client_name"}
    if "path" not in options:
        drop |= {"host", "port"}
    return {name: value for name, value in options.items() if name not in drop}


def _host(text: str, default: int) -> Host:
    name, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        name, port = text, str(default)
    number = int(port)
    name = name.strip("[]")
    if not name or any(c.isspace() for c in name) or not 0 < number < 65536:
        raise ValueError("no host and port")
    return Host(name, number)


def _split_query(query: str) -> tuple[str, dict[str, str]]:
    """Options for the servers as a query again, and the Sentinels' own user and password."""
    names = {"sentinel_username": "username", "sentinel_password": "password"}
    parts = [part for part in query.split("&") if part]
    own = [part for part in parts if part.partition("=")[0] not in names]
    given = {n: v[0] for n, v in parse_qs(query, strict_parsing=bool(query)).items() if n in names}
    return "?" + "&".join(own) if own else "", {names[n]: v for n, v in given.items()}
