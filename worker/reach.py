"""Can gateways reach a worker under the address that it registers? Pure."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from shared import redisurl


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, seen from itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def unreachable(url: str, redis_url: str) -> str:
    """Why nobody else could use a registration, and what to do; empty if all is well.

    Whoever registers with a Redis on another machine has gateways there that cannot come to this
    machine's loopback address.
    """
    host = urlsplit(url).hostname or ""
    servers = redisurl.parse(redis_url).hosts
    if not is_loopback(host) or all(is_loopback(server.host) for server in servers):
        return ""
    return (
        f"{url} is registered in a Redis on another machine, from where nobody can reach it: "
        "use --host 0.0.0.0, or say HEADWATER_SERVE__ADVERTISE_URL=http://HOST:PORT"
    )
