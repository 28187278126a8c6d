"""Redis addresses: checked before anything starts, and shown without their secrets."""

from __future__ import annotations

from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

from shared.errors import ConfigError

FORM = (
    "must look like redis://[[user]:password@]host[:port][/db] (or rediss://, unix://), with no "
    "option that the client does not know; special characters of a password as %XX"
)


def shown(url: str) -> str:
    """The address as a message may show it: without user, password and options."""
    scheme, separator, rest = url.rpartition("://")
    _, at, place = rest.rpartition("@")
    hidden = "***@" if at else ""
    return f"{scheme}{separator}{hidden}{place.partition('?')[0]}"


def check(url: str) -> None:
    """Raise ``ConfigError`` for an address that no connection could be made from; makes none.

    The client's own message is not repeated: it may quote a piece of the password.
    """
    try:
        pool = ConnectionPool.from_url(url, protocol=2)
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError):
        raise ConfigError("redis.url", shown(url), FORM) from None
