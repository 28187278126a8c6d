"""A worker's own event feed: what is read when Redis is not there, or cannot close a gap.

GET /headwater/events?epoch=E&after=SEQ
frames: u32 little-endian length, then that many bytes of msgpack; length 0 is a keep-alive
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import aiohttp
import msgspec

from shared.events import EventBatch, decode_batch
from shared.types import Epoch

FRAME_LIMIT = 256 << 20
"""Bytes; a snapshot of 30 million blocks."""
SILENT_S = 5.0
"""A feed without even a keep-alive for this long is cut."""


class FeedBroken(Exception):
    """The feed ended or said something that is no frame; the message says what."""


@dataclass(slots=True)
class FrameParser:
    """Bytes in, whole frames out, however they were cut."""

    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        """Frames completed by ``data``; empty ones are keep-alives.

        :raises FeedBroken: a length beyond every sense.
        """
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= 4:
            length = int.from_bytes(buffer[start : start + 4], "little")
            if length > FRAME_LIMIT:
                raise FeedBroken(f"frame of {length} bytes")
            if len(buffer) - start - 4 < length:
                break
            frames.append(bytes(buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        if start:
            del buffer[:start]
        return frames


async def read_feed(
    session: aiohttp.ClientSession,
    url: str,
    resume: tuple[Epoch, int] | None,
    *,
    connect_s: float,
    headers: dict[str, str],
) -> AsyncGenerator[list[EventBatch], None]:
    """Batches of a worker's feed as they arrive; none of them after a sign of life without news.
    Never ends by itself.

    :param resume: after which batch to go on; None asks for the whole contents.
    :raises FeedBroken: for every reason to stop.
    """
    params = {} if resume is None else {"epoch": str(resume[0]), "after": str(resume[1])}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=SILENT_S)
    try:
        async with session.get(
            f"{url}/headwater/events",
            params=params,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                raise FeedBroken(f"status {response.status}")
            parser = FrameParser()
            async for chunk in response.content.iter_any():
                yield [decode_batch(frame) for frame in parser.feed(chunk) if frame]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise FeedBroken(f"{type(error).__name__}: {error}"[:200]) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise FeedBroken(f"undecodable batch: {error}") from error
    raise FeedBroken("closed by the worker")
