"""The gate: a request passes when a worker has room for it, and waits in the gateway until then.

Waiting requests are bound when an answer ends, and looked at again a few times a second, since
workers also come, recover and finish what others sent them. Each time the request is matched and
ranked anew: what was the best worker when it arrived may not be when it goes. Binding happens
inside of one call, so room that was seen cannot be gone when it is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission import AdmissionQueue, Ticket
from gateway.config import AdmissionConfig
from gateway.routing.base import Query
from shared.errors import ApiError, NoCapacity

TICK_S = 0.05
LEAST_S = 0.05
"""What is left of a request's time when it leaves the queue: with less it would be late anyway, and
must not be told that a worker had it."""
QUEUE_FULL, QUEUE_TIMEOUT, DEADLINE = "queue_full", "queue_timeout", "deadline"

Bind = Callable[[bool], float | None]
"""Binds the request to a worker, if there is room; returns None, or the seconds its prefill would
take if there is none. The argument tells that it may be held back although there is room for it.
Raises ``ApiError`` if nobody can serve it any more."""


class Shed(NoCapacity):
    """The request was turned away; ``reason`` is a label of ``headwater_shed_total``."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


@dataclass(slots=True, eq=False)
class _Waiter:
    bind: Bind
    hold_until: float
    passed: asyncio.Future[None]


class Gate:
    """Holds the queue and those who wait in it."""

    def __init__(self, config: AdmissionConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self.queue = AdmissionQueue(config.queue, config.oldest_every)
        self._waiters: dict[Ticket, _Waiter] = {}
        self._tick: asyncio.TimerHandle | None = None

    def reconfigure(self, config: AdmissionConfig) -> None:
        """Other settings; there may be room for some who wait."""
        self._config = config
        self.queue.resize(config.queue, config.oldest_every)
        if self._waiters:
            self.pump()

    @property
    def may_hold(self) -> bool:
        """A request may be held back although there is room for it."""
        return self._config.hold_ms > 0

    async def passes(self, query: Query, tokens: int, bind: Bind, own_s: float = 0.0) -> Ticket:
        """Return when a request has been bound that could not be at once; the ticket it got.

        :param own_s: seconds its prefill would take, if it was tried already.
        :raises Shed: it was turned away.
        :raises ApiError: nobody can serve it.
        """
        now, hold_s = self._clock(), self._config.hold_ms / 1e3
        leave_by = now + self._config.queue_s
        if query.deadline is not None:
            leave_by = min(leave_by, query.deadline - max(own_s, LEAST_S))
        ticket = Ticket(query.model, query.priority, query.tenant, tokens, now, leave_by)
        waiter = _Waiter(bind, now + hold_s, asyncio.get_running_loop().create_future())
        self._waiters[ticket] = waiter
        try:
            self._enter(ticket)
            async with asyncio.timeout(max(0.0, leave_by - now)):
                await waiter.passed
        except TimeoutError:
            if not waiter.passed.done() or waiter.passed.cancelled():
                raise self._late(ticket, query) from None
        finally:
            self._waiters.pop(ticket, None)
            self.queue.leave(ticket)
        return ticket

    def released(self, now: float) -> None:
        """An answer has ended: somebody may pass."""
        self.queue.drain.release(now)
        if self._waiters:
            self.pump()

    def pump(self) -> None:
        """Let those pass for whom there is room, the most urgent first."""
        now, blocked = self._clock(), set[str]()
        while (ticket := self.queue.next(blocked)) is not None:
            waiter = self._waiters.get(ticket)
            if waiter is None or waiter.passed.done():
                self.queue.leave(ticket)
                continue
            try:
                unbound = waiter.bind(now < waiter.hold_until)
            except ApiError as error:
                self.queue.leave(ticket)
                waiter.passed.set_exception(error)
                continue
            if unbound is None:
                self.queue.admit(ticket)
                waiter.passed.set_result(None)
            else:
                blocked.add(ticket.model)

    def _enter(self, ticket: Ticket) -> None:
        turned_away = self.queue.enter(ticket)
        if turned_away is not None:
            waiter = self._waiters[turned_away]
            if not waiter.passed.done():
                message = "No worker has room, and too many requests are waiting."
                waiter.passed.set_exception(self._shed(message, QUEUE_FULL, turned_away))
        if turned_away is not ticket:
            self.pump()
            self._watch()

    def _late(self, ticket: Ticket, query: Query) -> Shed:
        if query.deadline is not None and ticket.leave_by < ticket.entered + self._config.queue_s:
            message = "No worker could begin in time for the request's deadline."
            return self._shed(message, DEADLINE, ticket)
        message = f"No worker had room for {self._config.queue_s:g} s."
        return self._shed(message, QUEUE_TIMEOUT, ticket)

    def _shed(self, message: str, reason: str, ticket: Ticket) -> Shed:
        after = self.queue.retry_after_s(ticket.priority, self._clock())
        return Shed(message, reason, self._config.queue_s if after is None else after)

    def _watch(self) -> None:
        """Look again from time to time while somebody waits."""
        if self._tick is None and self._waiters:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._look_again)

    def _look_again(self) -> None:
        self._tick = None
        self.pump()
        self._watch()
