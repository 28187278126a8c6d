"""One Redis connection that belongs to one task, and is thrown away at the first doubt.

A pool hands a connection on whose last reply was never read; a cancelled command then answers its
successor. Here nothing is handed on: after an error, a timeout or a cancellation the connection is
dropped, and the next call opens a new one. Timeouts hold whatever the URL says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from gateway.index.redis import Command, Reply

MAX_PIPELINE = 1000
"""Commands in one write, at most."""

_LONGEST_WAIT_S = 10.0


class RedisLost(Exception):
    """Redis cannot be used now; the message says why, without credentials."""


class RedisLink:
    """``call`` is not reentrant: one task owns a link."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """:raises ValueError: the URL is none that redis-py knows."""
        self._pool = ConnectionPool.from_url(
            url,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,
        )
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None

    @property
    def connected(self) -> bool:
        """A connection is open (which says nothing about the peer)."""
        return self._connection is not None

    async def call(self, commands: Sequence[Command], wait_s: float = 0.0) -> list[Reply]:
        """Send all commands in one write and read all replies.

        :param wait_s: how much longer than usual the server may take (a blocking read).
        :returns: one raw RESP2 reply per command; an error reply of a single command is returned in
            its place as ``ResponseError``.
        :raises RedisLost: no connection, no answer in time, or a server that is no master any more.
        """
        if len(commands) > MAX_PIPELINE:
            raise ValueError(f"{len(commands)} commands in one pipeline")
        try:
            async with asyncio.timeout(self._timeout_s + min(wait_s, _LONGEST_WAIT_S)):
                return await self._exchange(commands)
        except TimeoutError as error:
            await self.drop()
            raise RedisLost("no answer in time") from error
        except (RedisError, OSError) as error:
            await self.drop()
            raise RedisLost(f"{type(error).__name__}: {error}") from error
        except BaseException:
            await self.drop()
            raise

    async def _exchange(self, commands: Sequence[Command]) -> list[Reply]:
        connection = self._connection
        if connection is None:
            # Kept before it is connected, so that a cancelled handshake is dropped like the rest.
            connection = self._connection = self._new_connection()
            await connection.connect_check_health(check_health=False, retry_socket_connect=False)
        packed = connection.pack_commands(commands)
        await connection.send_packed_command(packed, check_health=False)
        return [await _read(connection) for _ in commands]

    def _new_connection(self) -> AbstractConnection:
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        # ``call`` has a deadline for the whole exchange. With one of its own, redis-py sends by
        # asyncio.wait_for, which until Python 3.12 can swallow a cancellation.
        connection.socket_timeout = None
        return connection

    async def drop(self) -> None:
        """Close without waiting; safe while being cancelled."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)


async def _read(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ReadOnlyError:
        raise
    except ResponseError as error:
        return error
