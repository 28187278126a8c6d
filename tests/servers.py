"""How a server of the tests stops listening."""

from __future__ import annotations

import asyncio

_TURNS = 4
"""Of the loop, from an accepted connection to its protocol."""


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server without losing whom it has just accepted.

    Python 3.11 makes no transport for a connection that is between `accept` and its protocol when
    the server closes, and leaves its socket open: the client waits, and a warning comes at some
    other time. So nobody is accepted any more first, and those who were get their protocol.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    server.close()
