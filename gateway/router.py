"""The heart, without I/O: what happens on join, leave, load, event, decide, first token, finish.

Time is always an argument, in monotonic seconds; randomness comes from the RNG given at the start.
Rules:
- Work is booked when a worker is selected and released exactly once per attempt, by its lease.
- ``decide`` and ``explain`` change no bookings; only ``begin`` does.
- Redis, sockets and clocks are somebody else's business: whoever follows them calls in here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from random import Random

from gateway.config import RoutingConfig
from gateway.deciding import Decider
from gateway.decision import (
    AttemptEnd,
    Booked,
    ModelProfile,
    Overlap,
    Reject,
    Route,
    WorkerStatus,
)
from gateway.fleet import Fleet
from gateway.index.base import Applied, PrefixIndex
from gateway.indexview import IndexReader, IndexStats, WhoHolds
from gateway.knowledge import Knowledge
from gateway.learned import Fact
from gateway.lease import Lease, rejection_record
from gateway.member import Member
from gateway.outcomes import Outcomes
from gateway.parity import Parity, Verdict
from gateway.records import RequestRecord
from gateway.routing.base import Policy, Query, Trust
from gateway.routing.cost import CostModel
from gateway.routing.pressure import Flows
from gateway.routing.rates import RateBook
from gateway.status import describe
from gateway.trust import TrustChange
from shared.errors import ApiError
from shared.events import EventBatch
from shared.load import WorkerInfo, WorkerLoad
from shared.types import Tier, WorkerId

__all__ = [
    "AttemptEnd",
    "Booked",
    "Lease",
    "ModelProfile",
    "Overlap",
    "Reject",
    "Route",
    "Router",
    "WorkerStatus",
]

OPERATOR = "operator"
RULE = "rule"
"""What drains a worker that must not serve here (:meth:`Router.accept`)."""
_TIDY_BUDGET = 4096


class Router:
    """Decides which worker serves a request, and remembers what it decided."""

    def __init__(
        self,
        index: PrefixIndex,
        policies: Mapping[str, Policy],
        config: RoutingConfig,
        rng: Random,
        timer: Callable[[], float] = lambda: 0.0,
        cost: CostModel | None = None,
        on_trust: Callable[[TrustChange], None] = lambda change: None,
    ) -> None:
        self._index = index
        self._policies = policies
        self._config = config
        self._rng = rng
        self._turn = 0
        self._cost = cost or CostModel()
        self._rates = RateBook(config.prefill_s_per_token, self._cost)
        self._fleet = Fleet(self._rates, config.host_s_per_token)
        self._knowledge = Knowledge(index, config.ghost_blocks, on_trust)
        self._decider = Decider(self._fleet, self._knowledge, self._cost, timer)
        self._reader = IndexReader(index, self._knowledge, config.index_max_blocks)
        self._outcomes = Outcomes(self._fleet, self._rates, self._knowledge)
        self._unfit: Callable[[WorkerInfo], str] = lambda info: ""

    # ---------------------------------------------------------------- facts that come in

    def join(self, info: WorkerInfo, now: float) -> None:
        """A worker is there. Idempotent; a new epoch means it restarted and holds nothing."""
        member, fresh = self._fleet.join(info, now)
        self._judge(member)
        self._knowledge.join(member, fresh=fresh)

    def accept(self, unfit: Callable[[WorkerInfo], str]) -> None:
        """Give workers for which ``unfit`` names a reason no request, now and when they join."""
        self._unfit = unfit
        for member in self._fleet:
            self._judge(member)

    def _judge(self, member: Member) -> None:
        why = self._unfit(member.info)
        if why:
            member.drains[RULE] = why
        else:
            member.drains.pop(RULE, None)

    def leave(self, worker: WorkerId, now: float, reason: str) -> None:
        """A worker is gone; running leases stay valid. Unknown workers are fine."""
        member = self._fleet.leave(worker)
        if member is not None:
            member.healthy, member.down_reason = False, reason
            self._rates.forget(member.pool, worker)
        self._knowledge.forget(worker)

    def set_health(self, worker: WorkerId, healthy: bool, now: float, reason: str) -> None:
        """Result of a probe."""
        member = self._fleet.get(worker)
        if member is not None:
            if healthy and not member.healthy:
                member.breaker.reset()
            member.healthy = healthy
            member.down_reason = "" if healthy else reason

    def drain(self, worker: WorkerId, now: float, by: str = OPERATOR, why: str = "") -> bool:
        """No new requests until ``by`` allows them again. False: no such worker."""
        member = self._fleet.get(worker)
        if member is not None:
            member.drains[by] = why
        return member is not None

    def undrain(self, worker: WorkerId, now: float, by: str = OPERATOR) -> bool:
        """``by`` allows new requests; others may still forbid them. False: no such worker."""
        member = self._fleet.get(worker)
        if member is not None:
            member.drains.pop(by, None)
        return member is not None

    def set_trust(self, worker: WorkerId, trust: Trust, reason: str, now: float) -> None:
        """How far its feed allows to believe the index for this worker, and why.

        A gap in its events lowers that at once; only a further call raises it. What else lowers
        trust stays in force (:mod:`gateway.trust`).
        """
        self._knowledge.feed_says(worker, trust, reason, now)

    def limit_trust(self, worker: WorkerId, cause: str, limit: Trust | None, reason: str) -> None:
        """Believe a worker at most so far, whatever its feed says; None lifts the limit.

        :param cause: who says so; each cause has one limit.
        """
        self._knowledge.trust.limit(worker, cause, limit, reason)

    def note_parity(self, worker: WorkerId, parity: Parity, now: float) -> None:
        """Whether a worker makes the same tokens of a prompt. Unknown workers are fine.

        One that makes others is not believed to be ``exact``: its events name other keys than ours.
        """
        member = self._fleet.get(worker)
        if member is not None:
            member.parity = parity
            limit = Trust.LEARNED if parity.verdict is Verdict.DIFFERENT else None
            self.limit_trust(worker, "tokens", limit, f"its tokens differ: {parity.reason}")

    def apply_load(self, worker: WorkerId, load: WorkerLoad, now: float) -> None:
        """What the worker says about its load. Unknown workers are fine, and any order."""
        member = self._fleet.get(worker)
        if member is None or member.outdated(load):
            return
        self._rates.report(member.pool, worker, load.prefill_tokens_per_s)
        s_per_token = self._rates.s_per_token(member.pool, worker)
        member.report(load, now, s_per_token)
        self._fleet.served_at_once(member, load.running)
        self._knowledge.resize(member)
        self._index.tidy(_TIDY_BUDGET)

    def apply_events(self, batch: EventBatch, now: float) -> Applied:
        """Cache events; the caller fetches a snapshot when the answer is not ok."""
        return self._knowledge.apply(batch, self._fleet.get(batch.worker), now)

    def learned(self, limit: int) -> Iterable[Fact]:
        """Facts about workers without cache events that the other gateways do not know yet."""
        return self._knowledge.outbox.take(limit)

    def drop_learned(self) -> None:
        """The others cannot be told now."""
        self._knowledge.outbox.drop()

    def apply_learned(self, fact: Fact) -> None:
        """What another gateway saw a worker do. Unknown workers are fine."""
        member = self._fleet.get(WorkerId(fact.worker))
        if member is not None:
            self._knowledge.told(member, fact)

    def apply_peer_bookings(
        self, gateway: str, booked: Mapping[WorkerId, Booked], told: float
    ) -> None:
        """What another gateway had booked when it ``told`` so; replaces what it told before, empty
        clears it."""
        self._fleet.apply_peer(gateway, booked, told)

    def apply_peer_flows(self, gateway: str, flows: Flows | None) -> None:
        """What another gateway sends to workers, per second; None: it is gone."""
        self._fleet.hear_flows(gateway, flows)

    # ---------------------------------------------------------------- what can be asked

    def flows(self, now: float) -> Flows:
        """What this gateway sends to workers, per second. Pure."""
        return self._fleet.flows(now)

    def bookings(self, now: float) -> Mapping[WorkerId, Booked]:
        """Own booked work by worker, without the idle ones. Pure."""
        return self._fleet.bookings(now)

    def profile(self, model: str) -> ModelProfile | None:
        """How to read prompts for a model name or alias; None: no live worker has it."""
        return self._fleet.profile(model)

    def models(self) -> tuple[str, ...]:
        """All names that live workers answer to, adapters' too, sorted."""
        return self._fleet.models()

    def base_models(self) -> list[str]:
        """The same without adapters'."""
        return [name for name in self.models() if self.parent(name) is None]

    def parent(self, name: str) -> str | None:
        """The model that an adapter belongs to; None: the name is no adapter's."""
        return self._fleet.parent(name)

    def workers(self, now: float) -> list[WorkerStatus]:
        """All members, sorted by id."""
        members = sorted(self._fleet, key=lambda member: member.id)
        return [self._describe(member, now) for member in members]

    def has(self, worker: str) -> bool:
        """Whether it is a member, or has left and still answers something."""
        return self._fleet.has(WorkerId(worker))

    def others(self, model: str, worker: WorkerId) -> tuple[WorkerId, ...]:
        """Who serves a model beside this worker; nobody if it does not serve it itself."""
        serving = [member.id for member in self._fleet.serving(model)]
        return tuple(other for other in serving if other != worker) if worker in serving else ()

    def pool(self, worker: WorkerId) -> str | None:
        """The first model that a member serves; None: there is no such member, or it has none."""
        member = self._fleet.get(worker)
        return None if member is None else member.pool or None

    def worker_url(self, worker: WorkerId) -> str | None:
        """Base URL of a member."""
        member = self._fleet.get(worker)
        return None if member is None else member.info.url

    def ready(self) -> tuple[bool, list[str]]:
        """Whether some worker can take a request, and if not, why not.

        A worker that rests after failures counts as able: it is tried when there is no other.
        """
        reasons = [f"worker {m.id}: {m.blocked}" for m in self._fleet if m.blocked]
        if len(reasons) < len(self._fleet):
            return True, []
        return False, reasons or ["no worker has joined"]

    def reconfigure(self, policies: Mapping[str, Policy], config: RoutingConfig) -> None:
        """Other policies or settings from the next decision on. What is sized at the start (index,
        ghosts, first rates) stays as it is."""
        self._policies, self._config = policies, config

    def index_stats(self, now: float) -> IndexStats:
        """What the index holds. Pure."""
        return self._reader.stats(sorted(self._fleet, key=lambda member: member.id))

    def who(self, query: Query, now: float) -> WhoHolds | None:
        """Who holds a prompt; None: nobody has its model."""
        serving = self._fleet.serving(query.model)
        return self._reader.who(query, serving, now) if serving else None

    def flush(self, worker: WorkerId, now: float) -> int | None:
        """Forget what a worker holds; how many index entries that were, None: no such worker.

        Whoever follows its feed must ask for everything again.
        """
        member = self._fleet.get(worker)
        return None if member is None else self._knowledge.flush(member)

    # ---------------------------------------------------------------- requests

    def decide(
        self,
        query: Query,
        now: float,
        *,
        policy: str | None = None,
        exclude: Collection[WorkerId] = (),
    ) -> Route | Reject:
        """Rank the workers for a request. ``exclude``: already tried. Unknown policy: KeyError."""
        chosen = self._policies[policy or self._config.policy]
        self._turn += 1
        return self._decider.decide(query, now, chosen, self._rng, exclude, self._turn)

    def explain(
        self,
        query: Query,
        now: float,
        *,
        policy: str | None = None,
        exclude: Collection[WorkerId] = (),
    ) -> Route | Reject:
        """As :meth:`decide`, without moving the state of a policy or the RNG."""
        chosen = deepcopy(self._policies[policy or self._config.policy])
        rng = deepcopy(self._rng)
        return self._decider.decide(query, now, chosen, rng, exclude, self._turn)

    def begin(self, route: Route, now: float, *, attempt: int) -> Lease:
        """Book the chosen worker (``route.order[0]``). ``attempt`` counts from 1.

        :raises LookupError: the worker has left since the decision.
        """
        member = self._fleet.get(route.worker)
        if member is None:
            raise LookupError(f"worker {route.worker} has left")
        return self._outcomes.begin(self._decider.book(route, member, now, attempt))

    def reject_record(
        self,
        query: Query | None,
        route: str,
        error: ApiError,
        now: float,
        wall_at: float,
    ) -> RequestRecord:
        """The record of a request that reached no worker."""
        return rejection_record(query, route, error, now, wall_at)

    # ---------------------------------------------------------------- inside

    def _describe(self, member: Member, now: float) -> WorkerStatus:
        return describe(
            member,
            now,
            trust=self._knowledge.trust.of(member.id),
            index_blocks=self._index.blocks(member.id),
            index_host_blocks=self._index.blocks(member.id, Tier.HOST),
            prefill_s_per_token=self._rates.s_per_token(member.pool, member.id),
            prediction_error=self._knowledge.trust.error_share(member.id),
            learned_tokens=self._knowledge.capacity_tokens(member),
        )
