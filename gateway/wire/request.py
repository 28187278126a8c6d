"""A request as it comes in: its head at once, its body when it is asked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from gateway.exchange import ClientGone
from gateway.wire import limits
from shared.errors import BadRequest, PayloadTooLarge, RequestTimeout

if TYPE_CHECKING:
    from gateway.wire.served import ServerConnection


Meaning = tuple[str, str, str, CIMultiDict[str], dict[str, Any]]
"""Method, target, path, headers, memo."""


class ServerRequest:
    """One request of a connection. Valid until its answer has been sent."""

    __slots__ = (
        "_connection",
        "_pieces",
        "_size",
        "_waiter",
        "broken",
        "complete",
        "discard",
        "expects",
        "headers",
        "keep_alive",
        "length",
        "memo",
        "method",
        "old",
        "path",
        "target",
    )

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._pieces: list[bytes | memoryview] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self.method = ""
        self.target = ""
        """Path and query as they came."""
        self.path = ""
        self.headers: CIMultiDict[str] = CIMultiDict()
        """Read only: requests with one head share them."""
        self.memo: dict[str, Any] = {}
        """What was made of the head; shared in the same way."""
        self.length: int | None = None
        """Announced size of the body; None = in chunks, or no body."""
        self.old = False
        """HTTP/1.0: no chunks in the answer."""
        self.keep_alive = False
        self.expects = False
        """The client waits for ``100 Continue`` before it sends the body."""
        self.complete = False
        self.broken = False
        self.discard = False
        """What still comes of the body is thrown away."""

    def has_head(self, meaning: Meaning) -> None:
        """Its head is one that has been read before."""
        self.method, self.target, self.path, self.headers, self.memo = meaning
        self.keep_alive = True

    def share_head(self) -> Meaning:
        """What of its head holds for all requests with the same one: not its length."""
        self.headers.popall("Content-Length", None)
        return self.method, self.target, self.path, self.headers, self.memo

    async def body(self, limit: int) -> bytes:
        """The whole body; at most ``limit`` bytes and what one read brings are ever held.

        Raises :class:`PayloadTooLarge`, :class:`RequestTimeout`, ``BadRequest`` for broken framing,
        and :class:`ClientGone`.
        """
        if self.length is not None and self.length > limit:
            raise _too_large(limit)
        if not self.complete:
            await self._rest(limit)
        if self._size > limit:
            raise _too_large(limit)
        pieces, self._pieces = self._pieces, []
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return whole if type(whole) is bytes else bytes(whole)

    async def _rest(self, limit: int) -> None:
        if self.expects:
            self._connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        begun = limits.now()
        while not self.complete:
            if self.broken:
                raise BadRequest("The body's framing is broken.")
            if self._connection.lost:
                raise ClientGone
            if self._size > limit:
                raise _too_large(limit)
            late = begun + limits.BODY_S + self._size / limits.BODY_RATE
            await self._wait(late - limits.now())

    async def _wait(self, seconds: float) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._waiter
        except TimeoutError:
            raise RequestTimeout("The body did not come in time.") from None
        finally:
            self._waiter = None

    # --- the connection's side

    def take(self, data: bytes | memoryview) -> None:
        """A piece of the body."""
        if not self.discard:
            self._pieces.append(data)
            self._size += len(data)

    def wake(self) -> None:
        """Something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def drop_body(self) -> None:
        """Nobody will read it."""
        self.discard = True
        self._pieces.clear()


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than the limit of {limit} bytes.")
