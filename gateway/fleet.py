"""Who is there: membership, ejection, and the views that policies see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gateway.booking import Booking
from gateway.decision import Booked, ModelProfile
from gateway.member import Member
from gateway.routing.base import Trust, WorkerState, WorkerView
from gateway.routing.outputs import Outputs
from gateway.routing.places import ServiceTimes
from gateway.routing.pressure import Flows, Pressure
from gateway.routing.rates import RateBook
from gateway.views import SETTLED_S, PoolFacts, look
from shared.load import WorkerInfo
from shared.types import WorkerId

PEER_STALE_S = 2.0
"""What another gateway told counts for this long, so a dead gateway's work vanishes."""
_VIEW_LASTS_S = 0.05


class Fleet:
    """All members.

    A worker that left with attempts running gets them back when the same incarnation returns; a new
    incarnation starts at zero, and the old attempts end on the old counts.
    """

    def __init__(self, rates: RateBook, host_s_per_token: float) -> None:
        self._rates = rates
        self._host_s_per_token = host_s_per_token
        self._members: dict[WorkerId, Member] = {}
        self._departed: dict[WorkerId, Member] = {}
        self._serving: dict[str, list[Member]] = {}
        self._peers: dict[str, tuple[float, Mapping[WorkerId, Booked]]] = {}
        self.outputs = Outputs()
        self._pressure = Pressure()
        self._service = ServiceTimes()
        self._views: dict[WorkerId, tuple[int, float, WorkerView]] = {}
        """(version, when, view): good for a moment, while nothing happens on the worker."""
        self._profiles: dict[str, tuple[list[Member], ModelProfile]] = {}
        """By name, each with those whom it describes."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker: WorkerId) -> Member | None:
        """A member, or None."""
        return self._members.get(worker)

    def has(self, worker: WorkerId) -> bool:
        """Whether it is a member, or has left with attempts that still run."""
        left = self._departed.get(worker)
        return worker in self._members or (left is not None and left.inflight > 0)

    def serving(self, model: str) -> list[Member]:
        """Members that answer to the name of a model or an adapter, in any state, by id."""
        return self._serving.get(model, [])

    def models(self) -> tuple[str, ...]:
        """Names that some member that is not down answers to, adapters' too, sorted."""
        return tuple(
            sorted(
                name
                for name, members in self._serving.items()
                if any(member.healthy for member in members)
            )
        )

    def parent(self, name: str) -> str | None:
        """The model that an adapter belongs to; None: the name is no adapter's."""
        members = self.serving(name)
        return members[0].pool if members and name in members[0].adapters else None

    def join(self, info: WorkerInfo, now: float) -> tuple[Member, bool]:
        """The member, and whether it is a new incarnation (which holds nothing)."""
        member = self._members.get(info.id)
        if member is None:
            member = self._departed.pop(info.id, None)
            # The epoch of a foreign engine is ours, made at each meeting: it tells no restart.
            ours = info.engine == "headwater"
            if member is None or (ours and member.info.epoch != info.epoch):
                member = Member(info)
            self._members[info.id] = member
            member.healthy, member.down_reason = True, ""
            member.drains.clear()
            member.adopt(info)
            self._welcome(member, now)
            return member, True
        if member.info.epoch != info.epoch:
            member.restart(info)
            self._welcome(member, now)
            return member, True
        if member.info != info:
            member.adopt(info)
            self._index_models()
        return member, False

    def _welcome(self, member: Member, now: float) -> None:
        """A new incarnation among those that are there already."""
        peers = [other for other in self.serving(member.pool) if other is not member]
        settled = any(now - other.joined > SETTLED_S for other in peers)
        member.joined, member.newcomer = now, settled
        # What was sent to the incarnation before does not come back to this one.
        self._pressure.forget(member.id)
        self._pressure.welcome(member.id, [other.id for other in peers], now)
        self._index_models()

    def leave(self, worker: WorkerId) -> Member | None:
        """Take a member out; None: there is no such member."""
        member = self._members.pop(worker, None)
        if member is None:
            return None
        self._views.pop(worker, None)
        self._pressure.forget(worker)
        self._departed = {id_: gone for id_, gone in self._departed.items() if gone.inflight}
        if member.inflight:
            self._departed[worker] = member
        self._index_models()
        return member

    def profile(self, model: str) -> ModelProfile | None:
        """How to read prompts for a name; None: no member that is not down has it."""
        members = [member for member in self.serving(model) if member.healthy]
        if not members:
            return None
        kept = self._profiles.get(model)
        if kept is None or kept[0] != members:
            kept = self._profiles[model] = members, self._profile(model, members)
        return kept[1]

    @staticmethod
    def _profile(model: str, members: list[Member]) -> ModelProfile:
        lengths = [member.info.max_model_len for member in members]
        canonical, adapter = members[0].info.canonical(model), ""
        if model in members[0].adapters:
            scopes = Counter((member.pool, member.adapters[model].scope) for member in members)
            canonical, adapter = scopes.most_common(1)[0][0]
        return ModelProfile(
            canonical=canonical,
            tokenizer=next((m.info.tokenizer for m in members if m.info.tokenizer), ""),
            workers=tuple(member.id for member in members),
            min_block_size=min(member.info.block_size for member in members),
            max_model_len=0 if 0 in lengths else max(lengths),
            adapter=adapter,
            shares_prefixes=all(member.info.shares_prefixes for member in members),
        )

    def may_eject(self, member: Member, now: float) -> bool:
        """Never more than half of a model's workers rest, and never the last one."""
        peers = [m for m in self.serving(member.pool) if m.healthy]
        resting = sum(m.state(now) is WorkerState.EJECTED for m in peers)
        return 2 * (resting + 1) <= len(peers)

    # ---------------------------------------------------------------- load

    def views(
        self,
        members: Sequence[Member],
        trust: Mapping[WorkerId, Trust],
        now: float,
        state: WorkerState | None = None,
    ) -> list[WorkerView]:
        """What a policy may know of each of some members.

        :param state: of all of them, where it is known.
        """
        made: list[WorkerView] = []
        facts: dict[str, PoolFacts] = {}
        peers, s_per_token, offered = self._peers, self._rates.s_per_token, self._pressure.offered
        for member in members:
            worker, pool = member.id, member.pool
            steady = not (peers or member.pending) and member.steady
            if steady and (kept := self._views.get(worker)) is not None:
                version, at, view = kept
                current = version == member.version and view.trust is trust[worker]
                if current and 0.0 <= now - at < _VIEW_LASTS_S:
                    made.append(view)
                    continue
            common = facts.get(pool)
            if common is None:
                common = facts[pool] = self._facts(pool, now)
            view = look(
                member,
                trust[worker],
                now,
                common,
                state=state or member.state(now),
                s_per_token=s_per_token(pool, worker),
                offered=offered(worker, now),
                peers=self._peer_work(worker, now) if peers else None,
            )
            if steady:
                self._views[worker] = member.version, now, view
            made.append(view)
        return made

    def _facts(self, pool: str, now: float) -> PoolFacts:
        at_once, service_s = self._service.figures(pool)
        return PoolFacts(
            overhead_s=self._rates.overhead_s(pool),
            busy=self._pressure.share(pool, len(self._serving.get(pool, ())), now),
            at_once=at_once,
            service_s=service_s,
            usual_output=self.outputs.usual(pool),
            host_s_per_token=self._host_s_per_token,
        )

    def book(self, member: Member, booking: Booking) -> None:
        """An attempt begins."""
        member.book(booking)
        self._pressure.book(
            member.pool, member.id, booking.prefill_s, booking.begun, bound=booking.bound
        )

    def served_at_once(self, member: Member, requests: int) -> None:
        """So many it was seen to serve side by side."""
        self._service.served_at_once(member.pool, requests)

    def observe_service(self, member: Member, booking: Booking, now: float) -> None:
        """An attempt has been answered in full."""
        took = now - booking.begun
        # What it waited for prefills is known; half of the time is its own at the least.
        own = took - booking.wait_s
        own = own if own > took / 2 else took / 2
        self._service.observe(member.pool, own, booking.beside + 1)

    def bookings(self, now: float) -> dict[WorkerId, Booked]:
        """Own booked work, without the idle workers."""
        work = {member.id: member.booked(now) for member in self if member.inflight}
        return {worker: booked for worker, booked in work.items() if booked.count}

    def apply_peer(self, gateway: str, booked: Mapping[WorkerId, Booked], at: float) -> None:
        """What another gateway had booked at that time; replaces what it told before."""
        self._peers = {
            name: told for name, told in self._peers.items() if at - told[0] <= PEER_STALE_S
        }
        self._peers.pop(gateway, None)
        if booked:
            self._peers[gateway] = (at, dict(booked))

    def flows(self, now: float) -> Flows:
        """Prefill that this gateway sends to workers and pools, per second."""
        return self._pressure.flows(now)

    def hear_flows(self, gateway: str, flows: Flows | None) -> None:
        """What another gateway sends there; None: it is gone."""
        self._pressure.hear(gateway, flows)

    def _peer_work(self, worker: WorkerId, now: float) -> Booked:
        prefill_s, tokens, count = 0.0, 0, 0
        for at, told in self._peers.values():
            booked = told.get(worker)
            if booked is not None and now - at <= PEER_STALE_S:
                prefill_s += max(0.0, booked.prefill_s - (now - at))
                tokens += booked.decode_tokens
                count += booked.count
        return Booked(prefill_s, tokens, count)

    def _index_models(self) -> None:
        self._serving = {}
        self._profiles.clear()
        members = sorted(self._members.values(), key=lambda member: member.id)
        for member in members:
            for name in dict.fromkeys(member.info.models):
                self._serving.setdefault(name, []).append(member)
        models = frozenset(self._serving)
        for member in members:
            # A model's name means the model, also if an adapter elsewhere is called the same.
            for name in member.adapters.keys() - models:
                self._serving.setdefault(name, []).append(member)
        pools = {member.pool for member in self._members.values()}
        self.outputs.keep(pools)
