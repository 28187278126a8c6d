"""One attempt: a worker's answer on its way to the client.

Whatever fails before the first byte has reached the client leaves as :class:`AttemptFailed` (or
:class:`UpstreamError`), and the pipeline may try another worker; what fails later is told to the
client here. ``end`` releases the booking: as soon as the worker has done its part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from gateway import refusals, relayedstream, wholeanswers
from gateway.engines import catalogue
from gateway.engines.base import Engine
from gateway.exchange import BODYLESS, Answer, Client
from gateway.records import OK, Outcome
from gateway.refusals import AttemptFailed
from gateway.relayedstream import RelayTap
from gateway.streaming import StreamTap, error_event
from gateway.upstream import UpstreamBroken, UpstreamError, UpstreamResponse
from gateway.work import Work
from shared.openai import GenerateRequest, Usage, usual_usage
from shared.sse import SseEventTooLarge

EVENTS = "text/event-stream"
SETTLE_S = 0.2
"""How long a worker may take to end its answer after ``[DONE]`` to have its connection kept."""


class EndAttempt(Protocol):
    """Releases the booking of an attempt and keeps its record."""

    def __call__(
        self,
        item: Work,
        outcome: Outcome,
        status: int,
        usage: Usage | None = None,
    ) -> None:
        """Does nothing if that has been done."""
        ...


Gave = Callable[[Work, str], None]
"""Told the id of a response that a client has, while its attempt is booked."""


def deliver(
    work: Work,
    response: UpstreamResponse,
    client: Client,
    end: EndAttempt,
    gave: Gave,
    clock: Callable[[], float],
) -> Coroutine[Any, Any, None]:
    """Pass one answer on. Raises :class:`AttemptFailed`, ``UpstreamError`` or ``ClientGone``."""
    if not 200 <= response.status < 300:
        return _refused(response)
    is_json = response.content_type == "application/json"
    request = work.request
    if request is not None and request.stream and not is_json:
        return _stream(work, request, response, client, end, clock)
    if request is not None or is_json:
        return _whole(work, response, client, end, gave)
    if work.streamed and not _encoded(response):  # else the client asked for what is packed
        return _relayed(work, response, client, end, gave, clock)
    if wholeanswers.expected(work.inbound.route, response.content_type):
        return _whole(work, response, client, end, gave)
    return _verbatim(work, response, client, end)


async def _refused(response: UpstreamResponse) -> None:
    body = await _read_all(response, refusals.MAX_ERROR_BYTES)
    raise refusals.from_status(response.status, response.headers, body)


async def _whole(
    work: Work, response: UpstreamResponse, client: Client, end: EndAttempt, gave: Gave
) -> None:
    """An answer that is passed on when all of it is there."""
    body = response.rest()
    if body is None:
        body = await _read_all(response)
    usage = None
    if work.request is not None and (usage := usual_usage(body)) is None:
        decoded = refusals.decode_json(body)
        if not isinstance(decoded, dict) and not _encoded(response):
            raise refusals.no_answer()
        error = refusals.error_in(decoded)
        if error is not None:
            raise refusals.from_error_object(error)
        usage = _adapter(work).usage(decoded)
    elif work.request is None and not _encoded(response):
        usage, given = wholeanswers.look(work.inbound.route, body)
        gave(work, given)
    end(work, OK, response.status, usage)
    await client.send(work.marked(Answer(response.status, body, response.headers)))


def _adapter(work: Work) -> Engine:
    """How the engine that is tried speaks."""
    return catalogue.engine("" if work.lease is None else work.lease.engine)


def _encoded(response: UpstreamResponse) -> bool:
    """The body is packed, although nobody asked for it: not to be looked into."""
    packed = (value for name, value in response.headers if name.lower() == "content-encoding")
    return next(packed, "identity").lower() != "identity"


async def _verbatim(
    work: Work, response: UpstreamResponse, client: Client, end: EndAttempt
) -> None:
    """Bytes of a kind we do not look into. The head is held until the first of them."""
    data = await response.read()
    if response.status in BODYLESS:
        end(work, Outcome.OK, response.status)
        await client.send(work.marked(Answer(response.status, b"", response.headers)))
        return
    await client.start(response.status, work.mark(response.headers))
    try:
        while data:
            await client.write(data)
            data = await response.read()
    except UpstreamError:
        end(work, Outcome.UPSTREAM_ERROR, response.status)
        client.abort()
        return
    end(work, Outcome.OK, response.status)
    await client.finish()


async def _relayed(
    work: Work,
    response: UpstreamResponse,
    client: Client,
    end: EndAttempt,
    gave: Gave,
    clock: Callable[[], float],
) -> None:
    """A stream of another form: held until its first content, then event for event."""
    tap = RelayTap()
    work.relayed = True
    failed: UpstreamError = UpstreamBroken("the worker ended its answer early")
    known = ""

    def over() -> None:
        outcome = Outcome.OK if tap.complete and not tap.failed else Outcome.UPSTREAM_ERROR
        end(work, outcome, response.status, tap.usage)

    try:
        while data := await _more(response, tap):
            out = tap.feed(data, clock())
            if out and not client.started and work.lease is not None:
                work.lease.first_token(tap.last_at, tap)
            if out and tap.response != known:  # its reader may leave, and ask for it later
                known = tap.response
                gave(work, known)
            if tap.complete:  # what goes on from it may come before the worker closes
                over()
            await _forward(work, None, out, response, client)
    except UpstreamError as error:
        failed = error
    except SseEventTooLarge:
        failed = UpstreamBroken("the worker sent an event beyond all limits")
    await _forward(work, None, tap.end(clock()), response, client)
    if tap.error is not None:
        raise refusals.from_error_object(tap.error)
    if not tap.complete and not client.started:
        raise refusals.from_upstream(failed)
    over()
    if not tap.complete:
        told = refusals.decode_json(refusals.from_upstream(failed).answer.body)
        await client.write(relayedstream.error_event(refusals.error_in(told) or {}))
    await client.finish()


async def _more(response: UpstreamResponse, tap: RelayTap) -> bytes:
    """The next bytes; behind the last event only what comes at once, an end mark perhaps."""
    if not tap.complete:
        return await response.read()
    try:
        async with asyncio.timeout(SETTLE_S):
            return await response.read()
    except TimeoutError:
        return b""


async def _stream(
    work: Work,
    request: GenerateRequest,
    response: UpstreamResponse,
    client: Client,
    end: EndAttempt,
    clock: Callable[[], float],
) -> None:
    """Held until the first content, then byte for byte."""
    tap = work.tap = StreamTap(request, _adapter(work).usage)
    failure = await _pump(work, tap, response, client, clock)
    if failure is None:
        end(work, Outcome.OK, response.status)
        await client.finish()
        await response.settle(SETTLE_S)
    elif client.started:
        end(work, Outcome.UPSTREAM_ERROR, response.status)
        await client.write(error_event(failure.answer.body))
        await client.finish()
    else:
        raise failure


class _Passing:
    """Usual events of a stream under way need nothing but to be counted and passed on."""

    __slots__ = ("_client", "_clock", "_tap")

    def __init__(self, tap: StreamTap, client: Client, clock: Callable[[], float]) -> None:
        self._tap, self._client, self._clock = tap, client, clock

    def take(self, data: bytes) -> bool:
        """See :class:`gateway.upstream.Taker`."""
        if not self._client.flowing or not self._tap.take_usual(data, self._clock()):
            return False
        self._client.put(data)
        return True

    def take_chunk(self, data: bytes) -> bool:
        """See :class:`gateway.upstream.Taker`."""
        if not self._client.flowing or not self._tap.take_chunk(data, self._clock()):
            return False
        self._client.put_chunk(data)
        return True


async def _pump(
    work: Work,
    tap: StreamTap,
    response: UpstreamResponse,
    client: Client,
    clock: Callable[[], float],
) -> AttemptFailed | None:
    """Forward until the stream is over; says what went wrong, None if the answer is complete."""
    broken: UpstreamError = UpstreamBroken("the worker ended its answer early")
    passing = _Passing(tap, client, clock)
    try:
        while not tap.over and (data := await response.pass_on(passing)):
            await _forward(work, tap, tap.feed(data, clock()), response, client)
    except UpstreamError as error:
        broken = error
    except SseEventTooLarge:
        return refusals.from_upstream(UpstreamBroken("the worker sent an event beyond all limits"))
    await _forward(work, tap, tap.end(clock()), response, client)
    if tap.error is not None:
        return refusals.from_error_object(tap.error)
    # After the last choice has ended nothing is missing but the end mark, which ``end`` has added.
    return None if tap.complete else refusals.from_upstream(broken)


async def _forward(
    work: Work, tap: StreamTap | None, data: bytes, response: UpstreamResponse, client: Client
) -> None:
    if not data:
        return
    if not client.started:
        if work.lease is not None and tap is not None and tap.first_at is not None:
            work.lease.first_token(tap.first_at, tap)
        headers = response.headers
        if not response.content_type:
            headers = [*headers, ("Content-Type", EVENTS)]
        await client.start(response.status, work.mark(headers))
    await client.write(data)


async def _read_all(response: UpstreamResponse, limit: int | None = None) -> bytes:
    """The body, or its first part of about ``limit`` bytes."""
    pieces: list[bytes] = []
    size = 0
    while piece := await response.read():
        pieces.append(piece)
        size += len(piece)
        if limit is not None and size >= limit:
            break
    return b"".join(pieces)
