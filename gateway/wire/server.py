"""The public listener's server: HTTP/1.1 on httptools; its connections are in ``served.py``."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from socket import socket

from gateway.wire import limits
from gateway.wire.answers import Dates
from gateway.wire.request import ServerRequest
from gateway.wire.served import ServerConnection

Handler = Callable[[ServerRequest, ServerConnection], Awaitable[None]]


class WireServer:
    """Makes connections; knows the open ones."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        """Needs a running event loop."""
        self.handler = handler
        self._tls = tls
        self.connections: set[ServerConnection] = set()
        self.closing = False
        self.dates = Dates()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> ServerConnection:
        """Called for each new connection."""
        return ServerConnection(self, self._loop)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Bind; raises ``OSError``. Port 0 takes a free one."""
        return await self._loop.create_server(
            self, host, port, backlog=limits.BACKLOG, ssl=self._tls
        )

    async def listen_on(self, sock: socket) -> asyncio.Server:
        """The same on a socket that is bound; it is ours from now on."""
        return await self._loop.create_server(
            self, sock=sock, backlog=limits.BACKLOG, ssl=self._tls
        )

    async def shutdown(self, grace_s: float) -> None:
        """Close idle connections; those at work are cut after ``grace_s``."""
        self.closing = True
        running: list[asyncio.Task[None]] = []
        for connection in list(self.connections):
            if connection.task is None:
                connection.close()
            else:
                running.append(connection.task)
        if running:
            await asyncio.wait(running, timeout=grace_s)
        for connection in list(self.connections):
            connection.cancel()
        await asyncio.sleep(0)  # transports tell their protocols in the next turn
