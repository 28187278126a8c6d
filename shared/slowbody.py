"""How long our servers on aiohttp wait for what a client sends.

Half-sent requests would hold connections for ever. Answers are not limited by any of this.
"""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader

from shared.errors import PayloadTooLarge, RequestTimeout

BODY_S = 20.0
"""A body may pause so long, plus a second for each ``BODY_RATE`` bytes that have come."""
BODY_RATE = 64 * 1024


async def received(content: StreamReader, limit: int) -> bytes:
    """The whole body; at most about ``limit`` bytes are ever held.

    Raises :class:`PayloadTooLarge`, :class:`RequestTimeout`, and what the library says of broken
    framing or of a client that left.
    """
    pieces: list[bytes] = []
    size = 0
    begun = asyncio.get_running_loop().time()
    try:
        while not content.at_eof():
            if content.is_eof():
                piece: bytes = content.read_nowait(-1)
            else:
                async with asyncio.timeout_at(begun + BODY_S + size / BODY_RATE):
                    piece = await content.readany()
            size += len(piece)
            if size > limit:
                raise PayloadTooLarge(f"The body is larger than the limit of {limit} bytes.")
            pieces.append(piece)
    except TimeoutError:
        raise RequestTimeout("The body did not come in time.") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
