"""The sockets of N processes on one port, bound before any of them is started.

Bound is not open: a socket gets connections as soon as its process listens on it.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from shared.errors import ConfigError


def open_public(host: str, port: int, processes: int) -> list[list[socket.socket]]:
    """By process: one socket for each address of ``host``; port 0 takes a free one.

    :raises ConfigError: the port is taken, by whoever shares ports too, or there is no such host.
    """
    places = _places(host, port)
    sockets: list[list[socket.socket]] = [[] for _ in range(processes)]
    for family, address in places:
        if port:
            _check_free(family, address)
        for mine in sockets:
            # Further addresses of a free port take the number that the first one got.
            wanted = (address[0], port or port_of(sockets), *address[2:])
            mine.append(_bound(family, wanted, shared=True))
    return sockets


def open_admin() -> socket.socket:
    """One on loopback, at a free port."""
    return _bound(socket.AF_INET, ("127.0.0.1", 0))


def port_of(sockets: list[list[socket.socket]]) -> int:
    """The public port; 0 before the first socket."""
    return int(sockets[0][0].getsockname()[1]) if sockets[0] else 0


def _places(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError("listen.host", host, f"no such address: {error.strerror}") from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _check_free(family: int, address: tuple[Any, ...]) -> None:
    """Whoever shares the port as well would share our clients, and nobody would notice."""
    _bound(family, address).close()


def _bound(family: int, address: tuple[Any, ...], *, shared: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        reason = f"cannot listen on {address[0]}: {os.strerror(error.errno or 0)}"
        raise ConfigError("listen.port", address[1], reason) from error
    return sock
