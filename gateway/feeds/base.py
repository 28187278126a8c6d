"""What the feeds need of the router: they push facts into it and never ask it for a decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from gateway.decision import Booked
from gateway.index.base import Applied
from gateway.learned import Fact
from gateway.parity import Parity
from gateway.routing.base import Trust
from gateway.routing.pressure import Flows
from shared.events import EventBatch
from shared.load import WorkerInfo, WorkerLoad
from shared.types import WorkerId

BY_WORKER, BY_LIST = "worker", "list"
"""Who wants a worker drained, besides an operator: itself, or a list that names it."""


class FedRouter(Protocol):
    """The part of :class:`gateway.router.Router` that background tasks call. All synchronous."""

    def join(self, info: WorkerInfo, now: float) -> None:
        """Idempotent; a new epoch means it restarted; new models or a new URL are taken over."""
        ...

    def leave(self, worker: WorkerId, now: float, reason: str) -> None:
        """Unknown workers are fine."""
        ...

    def set_health(self, worker: WorkerId, healthy: bool, now: float, reason: str) -> None:
        """Result of a probe."""
        ...

    def drain(self, worker: WorkerId, now: float, by: str = ..., why: str = ...) -> bool:
        """No new requests, until ``by`` says otherwise."""
        ...

    def undrain(self, worker: WorkerId, now: float, by: str = ...) -> bool:
        """``by`` allows new requests again."""
        ...

    def set_trust(self, worker: WorkerId, trust: Trust, reason: str, now: float) -> None:
        """How far the index is believed."""
        ...

    def note_parity(self, worker: WorkerId, parity: Parity, now: float) -> None:
        """Whether it makes the same tokens of a prompt."""
        ...

    def apply_load(self, worker: WorkerId, load: WorkerLoad, now: float) -> None:
        """What the worker says about its load."""
        ...

    def apply_events(self, batch: EventBatch, now: float) -> Applied:
        """One batch of cache events."""
        ...


class SharesBookings(Protocol):
    """The part of the router that gateways tell each other about."""

    def bookings(self, now: float) -> Mapping[WorkerId, Booked]:
        """Own booked work by worker, without the idle ones. Pure."""
        ...

    def apply_peer_bookings(
        self, gateway: str, booked: Mapping[WorkerId, Booked], told: float
    ) -> None:
        """What another gateway had booked when it ``told`` so; replaces what it told before, empty
        clears it."""
        ...

    def flows(self, now: float) -> Flows:
        """What this gateway sends to workers, per second. Pure."""
        ...

    def apply_peer_flows(self, gateway: str, flows: Flows | None) -> None:
        """What another gateway sends there; None: it is gone."""
        ...


class SharesLearned(Protocol):
    """The part of the router that gateways with workers without cache events tell each other."""

    def learned(self, limit: int) -> Iterable[Fact]:
        """Take up to ``limit`` facts that the others do not know yet."""
        ...

    def drop_learned(self) -> None:
        """They cannot be told now."""
        ...

    def apply_learned(self, fact: Fact) -> None:
        """What another gateway told. Unknown workers are fine."""
        ...


class FedAndSharing(FedRouter, SharesBookings, SharesLearned, Protocol):
    """The router as all feeds together see it."""
