"""An event publisher as vLLM and SGLang have it: PUB, and a ROUTER that repeats what it kept."""

from __future__ import annotations

import asyncio
from collections import deque

import zmq
import zmq.asyncio

KEPT = 10_000
QUEUE = 100_000
"""Batches that wait for a slow subscriber at most, as with the engines."""
PATIENCE = 100
"""Times that a port is tried, 20 ms apart."""
_END = b"\xff" * 8


class Publisher:
    """One incarnation's stream."""

    def __init__(self, context: zmq.asyncio.Context, kept: int = KEPT) -> None:
        self._context = context
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, QUEUE)
        self._router: zmq.asyncio.Socket | None = None
        self.port = self.replay_port = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.seq = 0
        self.lose = 0
        """So many of the next batches are not sent."""
        self.keep_lost = True
        """They can be had again from the replay."""
        self._task: asyncio.Task[None] | None = None

    async def bind(self, host: str, port: int = 0, replay_port: int | None = 0) -> None:
        """Listen. Port 0 takes a free one; without a ``replay_port`` nothing is repeated.

        :raises zmq.ZMQError: a port is taken.
        """
        self.port = await _bind(self._pub, host, port)
        if replay_port is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay_port = await _bind(self._router, host, replay_port)
            self._task = asyncio.create_task(self._answer())

    async def publish(self, payload: bytes) -> None:
        """Send one batch, or lose it."""
        seq, self.seq = self.seq, self.seq + 1
        if not self.lose or self.keep_lost:
            self._buffer.append((seq, payload))
        if self.lose:
            self.lose -= 1
            return
        await self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        assert self._router is not None
        while True:
            parts = await self._router.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8:
                continue
            start = int.from_bytes(parts[2], "big")
            for seq, payload in list(self._buffer):
                if seq >= start:
                    answer = [parts[0], b"", seq.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(answer)
            await self._router.send_multipart([parts[0], b"", _END, b""])

    async def close(self) -> None:
        """Close the sockets: their ports are free afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)


async def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    if not port:
        return socket.bind_to_random_port(f"tcp://{host}")
    for left in reversed(range(PATIENCE)):
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError:
            # A socket that was closed gives its port back a moment later.
            if not left:
                raise
            await asyncio.sleep(0.02)
        else:
            break
    return port
