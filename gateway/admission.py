"""Who waits in the gateway while no worker has room, who goes next, and who is turned away.

- A lower ``priority`` is more urgent (as in vLLM). One in ``oldest_every`` that go is the one that
  has waited longest, whatever it is: so nothing starves under a stream of urgent requests. (Urgency
  that grows with waiting would do as well, but a tenant that floods waits longest: it would undo
  the shares.)
- Among equally urgent requests the tenant goes next that was served the fewest tokens: each tenant
  has a virtual time that grows by the tokens of what it sends, and one that comes back after a
  pause starts at the time of those who are waiting, so that nothing can be saved up. Within a
  tenant: first come, first served.
- The queue is bounded. When it is full the least urgent request goes, of those the newest of the
  tenant with the most tokens waiting; that may be the newcomer itself.
- How long a refused client should wait follows from how fast requests have left their workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import ceil

import msgspec

from gateway.decision import Route
from gateway.routing.base import WorkerView

_KEPT_RELEASES = 64
_LONGEST_RETRY_S = 60.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits."""

    model: str
    priority: int
    tenant: str
    tokens: int
    """What serving it will take: the uncached prompt and the answer, as expected."""
    entered: float
    """Monotonic seconds."""
    leave_by: float
    """After that it is of no use to let it begin."""


@dataclass(slots=True)
class _Tenant:
    """The virtual time of one tenant, and what it has waiting."""

    time: float
    waiting: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Drain:
    """How fast requests leave their workers."""

    _releases: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_RELEASES))

    def release(self, now: float) -> None:
        """One has left."""
        self._releases.append(now)

    def seconds_for(self, requests: int, now: float) -> float | None:
        """How long until so many have left, at the present rate; None: nothing is known of it."""
        if len(self._releases) < 2 or now <= self._releases[0]:
            return None
        # Up to now, not up to the last one: if nothing leaves any more, the rate falls.
        rate = (len(self._releases) - 1) / (now - self._releases[0])
        return requests / rate


class AdmissionQueue:
    """The waiting requests of all models.

    :param most: requests that may wait.
    :param oldest_every: so many go for each that goes because it waited longest.
    """

    def __init__(self, most: int, oldest_every: int) -> None:
        self._most = most
        self._oldest_every = oldest_every
        self._since_oldest = 1
        self._lines: dict[tuple[str, int, str], deque[Ticket]] = {}
        """(model, priority, tenant) -> its requests, oldest first."""
        self._tenants: dict[str, _Tenant] = {}
        self._count = 0
        self.drain = Drain()

    def __len__(self) -> int:
        return self._count

    def resize(self, most: int, oldest_every: int) -> None:
        """Other limits, for those who come: whoever waits already may go on waiting."""
        self._most, self._oldest_every = most, oldest_every

    def depths(self) -> dict[int, int]:
        """How many wait, by priority. Pure."""
        depths: dict[int, int] = {}
        for (_, priority, _), line in self._lines.items():
            depths[priority] = depths.get(priority, 0) + len(line)
        return depths

    def waiting(self, model: str) -> bool:
        """Whether somebody waits for this model. Pure."""
        return bool(self._count) and any(name == model for name, _, _ in self._lines)

    def enter(self, ticket: Ticket) -> Ticket | None:
        """Queue a request; returns the one that has to go because of it, maybe itself."""
        self._join(ticket)
        if self._count <= self._most:
            return None
        worst = max(
            (line[-1] for line in self._lines.values()),
            key=lambda one: (one.priority, self._tenants[one.tenant].tokens, one.entered),
        )
        self.leave(worst)
        return worst

    def next(self, blocked: Collection[str] = ()) -> Ticket | None:
        """The request that goes next, of models that are not ``blocked``. Pure."""
        heads = [line[0] for key, line in self._lines.items() if key[0] not in blocked]
        if not heads:
            return None
        if self._since_oldest >= self._oldest_every:
            return min(heads, key=lambda one: one.entered)
        return min(
            heads, key=lambda one: (one.priority, self._tenants[one.tenant].time, one.entered)
        )

    def admit(self, ticket: Ticket) -> None:
        """It goes to a worker: its tenant pays for it."""
        turn = self._since_oldest >= self._oldest_every
        self._since_oldest = 1 if turn else self._since_oldest + 1
        tenant = self._tenants[ticket.tenant]
        tenant.time += ticket.tokens
        self.leave(ticket)

    def settle(self, ticket: Ticket, tokens: int) -> None:
        """What an admitted request really took, where that was only expected."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is not None:
            tenant.time += tokens - ticket.tokens

    def leave(self, ticket: Ticket) -> None:
        """It waits no longer, for whatever reason. One that has left already is fine."""
        key = (ticket.model, ticket.priority, ticket.tenant)
        line = self._lines.get(key)
        if line is None or ticket not in line:
            return
        line.remove(ticket)
        if not line:
            del self._lines[key]
        self._count -= 1
        tenant = self._tenants[ticket.tenant]
        tenant.waiting -= 1
        tenant.tokens -= ticket.tokens
        if not self._count:
            self._tenants.clear()

    def retry_after_s(self, priority: int, now: float) -> float | None:
        """How long until all that would go before a newcomer have left; None: not known. Pure."""
        ahead = sum(len(line) for (_, level, _), line in self._lines.items() if level <= priority)
        seconds = self.drain.seconds_for(ahead + 1, now)
        return None if seconds is None else min(_LONGEST_RETRY_S, max(1.0, ceil(seconds)))

    def _join(self, ticket: Ticket) -> None:
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            tenant = self._tenants[ticket.tenant] = _Tenant(self._now_served())
        elif not tenant.waiting:
            tenant.time = max(tenant.time, self._now_served())
        tenant.waiting += 1
        tenant.tokens += ticket.tokens
        key = (ticket.model, ticket.priority, ticket.tenant)
        self._lines.setdefault(key, deque()).append(ticket)
        self._count += 1

    def _now_served(self) -> float:
        """Virtual time of the tenant that was served least of those who wait."""
        waiting = [tenant.time for tenant in self._waiting()]
        return min(waiting, default=0.0)

    def _waiting(self) -> Iterator[_Tenant]:
        return (tenant for tenant in self._tenants.values() if tenant.waiting)


def with_room(route: Route, most: int) -> Route | None:
    """The route to the best worker that has fewer than ``most`` requests (0: however many); None:
    there is none. Pure."""
    if not most or _fits(route.chosen.candidate.worker, most):
        return route
    for at, scored in enumerate(route.order):
        if _fits(scored.candidate.worker, most):
            order = (scored, *route.order[:at], *route.order[at + 1 :])
            return msgspec.structs.replace(route, order=order)
    return None


def _fits(worker: WorkerView, most: int) -> bool:
    return worker.requests < most


def soon(route: Route, wait_s: float) -> bool:
    """Some worker would begin within ``wait_s`` and has room for its KV. Pure."""
    for scored in route.order:
        candidate = scored.candidate
        worker = candidate.worker
        free = worker.kv_tokens_total - worker.booked_decode_tokens
        if worker.booked_prefill_s < wait_s and (
            not worker.kv_tokens_total or candidate.new_kv_tokens <= free
        ):
            return True
    return False
