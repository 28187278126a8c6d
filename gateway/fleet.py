"""Who is there: membership, ejection, and the views that policies see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from gateway.booking import Booking
from gateway.decision import Booked, ModelProfile
from gateway.member import Member
from gateway.routing.base import Trust, WorkerState, WorkerView
from gateway.routing.outputs import Outputs
from gateway.routing.places import ServiceTimes
from gateway.routing.pressure import Pressure
from gateway.routing.rates import RateBook
from shared.load import WorkerInfo
from shared.types import WorkerId

PEER_STALE_S = 2.0
"""What another gateway told counts for this long, so a dead gateway's work vanishes."""
SETTLED_S = 30.0
"""So long a worker that joins a pool is new there: compiling, filling its caches."""
_NEW_PACE = 0.5
"""Its assumed speed meanwhile, as a share of what is known of it or its pool."""
_MIN_OUTPUT = 16.0
_VIEW_LASTS_S = 0.05


class _KeptView(msgspec.Struct, frozen=True):
    """A view that is good for a moment, while nothing happens on its worker."""

    version: int
    at: float
    view: WorkerView


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
        self._views: dict[WorkerId, _KeptView] = {}
        self._profiles: dict[str, tuple[list[Member], ModelProfile]] = {}
        """By name, each with those whom it describes."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker: WorkerId) -> Member | None:
        """A member, or None."""
        return self._members.get(worker)

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

    def view(self, member: Member, trust: Trust, now: float) -> WorkerView:
        """What a policy may know of a member."""
        if self._peers or not member.steady:
            return self._look(member, trust, now)
        kept = self._views.get(member.id)
        if (
            kept is not None
            and kept.version == member.version
            and kept.view.trust is trust
            and 0.0 <= now - kept.at < _VIEW_LASTS_S
        ):
            return kept.view
        view = self._look(member, trust, now)
        self._views[member.id] = _KeptView(member.version, now, view)
        return view

    def _look(self, member: Member, trust: Trust, now: float) -> WorkerView:
        pool, rates, report = member.pool, self._rates, member.reported(now)
        held = member.kv_tokens_held(report)
        total = member.kv_tokens_total()
        prefill_s, foreign = member.prefill_s(now), 0
        if report is not None:
            prefill_s += report.unbooked_prefill_s(now)
            foreign = report.foreign
        if self._peers:
            peers = self._peer_work(member.id, now)
            prefill_s += peers.prefill_s
            foreign = max(foreign, peers.count)
            held += peers.decode_tokens if report is None else 0
        token_s = member.token_s()
        fresh = member.newcomer and now - member.joined < SETTLED_S
        pace = rates.s_per_token(pool, member.id)
        release = 0.0
        if total and token_s:
            release = held / (token_s * max(_MIN_OUTPUT, self.outputs.usual(pool)))
        return WorkerView(
            id=member.id,
            state=member.state(now),
            trust=trust,
            block_size=member.info.block_size,
            inflight=member.inflight,
            booked_prefill_s=prefill_s,
            booked_decode_tokens=held,
            prefill_s_per_token=pace / _NEW_PACE if fresh else pace,
            fresh=fresh,
            overhead_s=rates.overhead_s(pool),
            host_s_per_token=member.host_token_s() or self._host_s_per_token,
            failure_rate=member.breaker.failure_rate(now),
            failure_s=member.breaker.lost_s,
            kv_tokens_total=total,
            load=None if report is None else report.load,
            load_age_s=0.0 if report is None else now - report.at,
            foreign=foreign + member.shadows(now),
            tpot_s=token_s,
            release_tokens_per_s=release,
            pool_busy=self._pressure.share(pool, len(self.serving(pool)), now),
            decoding=member.decoding,
            at_once=self._service.at_once(pool),
            service_s=self._service.seconds(pool),
            offered=self._pressure.offered(member.id, now),
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
        own = max(took - booking.wait_s, took / 2)
        share = min(1.0, self._service.at_once(member.pool) / (booking.beside + 1))
        self._service.observe(member.pool, share * own)

    def peers_prefill_s(self, member: Member, now: float) -> float:
        """Prefill seconds that the other gateways have booked on a member."""
        return self._peer_work(member.id, now).prefill_s if self._peers else 0.0

    def bookings(self, now: float) -> dict[WorkerId, Booked]:
        """Own booked work, without the idle workers."""
        work = {member.id: member.booked(now) for member in self if member.inflight}
        return {worker: booked for worker, booked in work.items() if booked.count}

    def apply_peer(self, gateway: str, booked: Mapping[WorkerId, Booked], now: float) -> None:
        """What another gateway has booked; replaces what it told before."""
        self._peers = {
            name: told for name, told in self._peers.items() if now - told[0] <= PEER_STALE_S
        }
        self._peers.pop(gateway, None)
        if booked:
            self._peers[gateway] = (now, dict(booked))

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
