"""A connection to an engine's publisher is noticed however quickly it is made."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest
import zmq
import zmq.asyncio

from gateway.feeds.zmqstream import RankStream
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
