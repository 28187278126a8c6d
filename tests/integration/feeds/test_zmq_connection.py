"""A connection to an engine's publisher is noticed however quickly it is made, or made anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from gateway.feeds.zmqstream import RankStream, Told, What
from gateway.index.stats import FeedStats


async def test_a_connection_made_before_anybody_looks_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    attach = zmq.asyncio.Socket.get_monitor_socket

    def slowly(self: Any, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.3)  # the I/O thread goes on meanwhile
        return attach(self, *arguments, **named)

    monkeypatch.setattr(zmq.asyncio.Socket, "get_monitor_socket", slowly)
    stream = RankStream(context, f"tcp://127.0.0.1:{port}", None, "", FeedStats())
    try:
        async with asyncio.timeout(20.0), aclosing(stream.follow()) as told:
            async for _ in told:
                if stream.connected:
                    break
    finally:
        publisher.close(linger=0)
        context.term()
    assert stream.connected


class _Engine:
    """Publishes at one port, in one incarnation after the other."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    async def start_anew(self) -> None:
        """Returns when the follower has subscribed again."""
        self.socket.close(linger=0)
        self.socket = self.context.socket(zmq.XPUB)
        async with asyncio.timeout(20.0):
            while True:
                try:
                    self.socket.bind(f"tcp://127.0.0.1:{self.port}")
                    break
                except zmq.ZMQError:  # the port is given back by another thread
                    await asyncio.sleep(0.005)
            assert await self.socket.recv() == b"\x01"

    async def publish(self, count: int) -> None:
        for seq in range(count):
            await self.socket.send_multipart([b"", seq.to_bytes(8, "big"), b"batch %d" % seq])


@asynccontextmanager
async def _followed() -> AsyncIterator[tuple[_Engine, RankStream, AsyncGenerator[Told, None]]]:
    """A stream that is connected and waits for something to come."""
    engine = _Engine()
    stream = RankStream(engine.context, f"tcp://127.0.0.1:{engine.port}", None, "", FeedStats())
    try:
        async with asyncio.timeout(30.0), aclosing(stream.follow()) as told:
            while (await anext(told)).what is not What.QUIET or not stream.connected:
                pass
            yield engine, stream, told
    finally:
        engine.socket.close(linger=0)
        engine.context.term()


async def test_what_is_quiet_since_the_connection_was_cut_does_not_count_as_silent() -> None:
    """Somebody else may have seen that the engine was started anew before the cut is."""
    async with _followed() as (engine, stream, told):
        coming = asyncio.ensure_future(anext(told))
        await asyncio.sleep(0.02)  # it waits for something to come by now
        await engine.start_anew()
        stream.restart()
        while (one := await coming).what is not What.RESTARTED:
            assert one.what is What.QUIET
            assert not stream.silent_so_far
            coming = asyncio.ensure_future(anext(told))
        while (await anext(told)).what is not What.QUIET:
            pass
        assert stream.silent_so_far


async def test_what_comes_with_a_new_connection_is_told_after_the_cut() -> None:
    async with _followed() as (engine, _, told):
        coming = asyncio.ensure_future(anext(told))
        await asyncio.sleep(0.02)
        await engine.start_anew()
        await engine.publish(3)
        seen = [await coming]
        while sum(one.what is What.BATCH for one in seen) < 3:
            seen.append(await anext(told))
        seen.append(await anext(told))
    named = [one.what for one in seen if one.what is not What.QUIET]
    assert named == [What.RESTARTED, What.COMPLETE, *[What.BATCH] * 3]
