"""Several answers of one request as one stream of (index, delta)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from worker.generation import Delta

Item = tuple[int, Delta] | BaseException | None


async def merge(
    streams: Sequence[AsyncIterator[Delta]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas as they come, tagged with the index of their stream.

    The first error of any stream ends all of them. Closing the result closes every stream, so no
    sibling goes on generating for nobody.
    """
    if len(streams) == 1:
        async with aclosing(_closable(streams[0])) as only:
            async for delta in only:
                yield 0, delta
        return
    ready: asyncio.Queue[Item] = asyncio.Queue()
    pumps = [
        asyncio.ensure_future(_pump(index, stream, ready)) for index, stream in enumerate(streams)
    ]
    running = len(pumps)
    try:
        while running:
            item = await ready.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, stream: AsyncIterator[Delta], ready: asyncio.Queue[Item]) -> None:
    """Move one stream's deltas; its end, or its error, is the last thing put."""
    end: BaseException | None = None
    try:
        async with aclosing(_closable(stream)) as deltas:
            async for delta in deltas:
                ready.put_nowait((index, delta))
    except Exception as error:  # noqa: BLE001 - handed to the consumer, who raises it
        end = error
    ready.put_nowait(end)


def _closable(stream: AsyncIterator[Delta]) -> AsyncGenerator[Delta, None]:
    """``stream`` as what it is: an async generator, whose ``aclose`` aborts the request."""
    if not isinstance(stream, AsyncGenerator):
        raise TypeError("a stream of deltas must be an async generator")
    return stream
