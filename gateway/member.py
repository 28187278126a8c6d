"""One worker as this gateway sees it: identity, state, and the work booked on it.

Work is booked when the worker is chosen. A booking is *pending* until its first token, then
*decoding* until its attempt ends; ending it twice does nothing, so counts cannot go negative. An
attempt that failed early leaves a *shadow*: its load counts for as long as the attempt would have
taken, or a worker that fails fast would always look idle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from gateway.booking import Booking, Reported
from gateway.breaker import Breaker, Gate
from gateway.decision import Booked
from gateway.parity import Parity
from gateway.routing.base import WorkerState
from shared.blocks import stride_of
from shared.load import AdapterInfo, WorkerInfo, WorkerLoad
from shared.types import WorkerId

STALE_LOAD_S = 5.0
"""A report older than this says nothing about now."""
_KEPT_PAST_S = 2.0
"""No report is thought to be older when it comes."""
_QUICKEST_S = 0.05
"""The fastest report may have taken this long."""
_TPOT_WEIGHT = 0.1


@dataclass(slots=True, eq=False)
class Member:
    """Mutable state of one worker; ``state``, ``booked`` and the like are pure."""

    info: WorkerInfo
    """Replaced by :meth:`adopt` only."""
    healthy: bool = True
    down_reason: str = ""
    drains: dict[str, str] = field(default_factory=dict)
    """Who wants no new requests on it, each with the reason, which may be empty."""
    parity: Parity = field(default_factory=Parity)
    """Whether it makes the same tokens of a prompt as the gateway."""
    breaker: Breaker = field(default_factory=Breaker)
    reports_cached: bool = False
    """It has told ``cached_tokens`` once: where it leaves them out they are 0."""
    tpot_s: float = 0.0
    joined: float = 0.0
    """When this incarnation was met first."""
    newcomer: bool = False
    """Others served its models long before."""
    version: int = 0
    """Grows with each change of the work on it."""
    _pending: dict[Booking, None] = field(default_factory=dict)
    _decoding: dict[Booking, None] = field(default_factory=dict)
    _shadows: list[tuple[float, float]] = field(default_factory=list)
    """(until, prefill seconds)."""
    _past: deque[Booking] = field(default_factory=deque)
    """Those that ended in the last 2 s, oldest first."""
    _started: float = inf
    """When the worker's uptime was 0, at the latest."""
    _prefill_ended: float = 0.0
    _reported: Reported | None = None
    id: WorkerId = field(init=False)
    pool: str = field(init=False)
    """Canonical model name: workers of one pool resemble each other."""
    stride: int = field(init=False)
    """Granules per index key."""
    adapters: dict[str, AdapterInfo] = field(init=False)
    """Its adapters by name."""

    def __post_init__(self) -> None:
        self.adopt(self.info)

    def adopt(self, info: WorkerInfo) -> None:
        """What it says about itself."""
        self.version += 1
        self.info, self.id = info, info.id
        self.pool = info.models[0] if info.models else ""
        self.stride = stride_of(info.block_size)
        self.adapters = {one.name: one for one in info.adapters if one.name not in info.models}

    @property
    def evicts_leaves_first(self) -> bool:
        """What it holds is whole beginnings of prompts, as a pool that is a tree does it. Of other
        makes that is not known: copies of a block, windows and connectors may leave holes."""
        return self.info.engine == "headwater"

    @property
    def inflight(self) -> int:
        """Own attempts that have not ended."""
        return len(self._pending) + len(self._decoding)

    def state(self, now: float) -> WorkerState:
        """Whether it may be chosen."""
        if not self.healthy:
            return WorkerState.DOWN
        if self.drains or (self._reported is not None and self._reported.load.draining):
            return WorkerState.DRAINING
        if not self.breaker.closed and self.breaker.gate(now) is Gate.OPEN:
            return WorkerState.EJECTED
        return WorkerState.READY

    @property
    def draining(self) -> bool:
        """No new requests, by somebody's wish or its own."""
        reported = self._reported
        return bool(self.drains) or (reported is not None and reported.load.draining)

    @property
    def blocked(self) -> str:
        """Why it takes no request whatever happens; empty if it may take some."""
        if not self.healthy:
            return self.down_reason or "down"
        if self.draining:
            why = next(filter(None, self.drains.values()), "")
            return f"draining: {why}" if why else "draining"
        return ""

    def reason(self, now: float) -> str:
        """Why it is not ready; empty if it is."""
        resting = self.state(now) is WorkerState.EJECTED
        return "failed too often" if resting else self.blocked

    # ---------------------------------------------------------------- own work

    @property
    def steady(self) -> bool:
        """What policies see of it hardly depends on the time, only on ``version``."""
        return not self._pending and not self._shadows and self.breaker.closed

    def book(self, booking: Booking) -> None:
        """An attempt begins."""
        self.version += 1
        self._drop_shadows(booking.begun)
        report = self.reported(booking.begun)
        booking.beside = self.inflight + (0 if report is None else report.foreign)
        self._pending[booking] = None

    def start_decoding(self, booking: Booking, now: float) -> None:
        """Its first token came. Unknown and ended bookings are fine."""
        if booking in self._pending:
            self.version += 1
            del self._pending[booking]
            self._decoding[booking] = None
            self._prefill_ended = booking.prefilled = now

    @property
    def decoding(self) -> int:
        """Attempts that have shown a token."""
        return len(self._decoding)

    def served_with(self, booking: Booking) -> int:
        """How many it serves at this moment, for sure, where an attempt of its shows a token or its
        end. What came before that one does not wait any more."""
        if booking not in self._pending:
            return len(self._decoding)
        earlier = next(at for at, other in enumerate(self._pending) if other is booking)
        return len(self._decoding) + earlier + 1

    def release(self, booking: Booking, now: float, *, failed: bool) -> bool:
        """The attempt ended; False: it had ended before, and nothing changes."""
        if booking in self._pending:
            del self._pending[booking]
            self._prefill_ended = booking.prefilled = now
            prefill_s = booking.prefill_s
        elif booking in self._decoding:
            del self._decoding[booking]
            prefill_s = 0.0
        else:
            return False
        self.version += 1
        self._drop_shadows(now)
        booking.ended = now
        self._past.append(booking)
        while (self._past[0].ended or 0.0) < now - _KEPT_PAST_S:
            self._past.popleft()
        if failed and booking.begun + booking.expected_s > now:
            self._shadows.append((booking.begun + booking.expected_s, prefill_s))
        return True

    def prefill_s(self, now: float) -> float:
        """Prefill work booked here and not yet done, in seconds.

        Prefills run one after another: the first pending one has worked since the one before it
        ended. Once it is overdue it counts again, up to its whole length: it may be stuck.
        """
        total = 0.0
        if self._shadows:
            total = sum(prefill_s for until, prefill_s in self._shadows if until > now)
        if not self._pending:
            return total
        total += sum(booking.prefill_s for booking in self._pending)
        head = next(iter(self._pending))
        elapsed = now - max(head.begun, self._prefill_ended)
        if elapsed <= head.prefill_s:
            done = max(0.0, elapsed)
        else:
            done = max(0.0, 2 * head.prefill_s - elapsed)
        return total - done

    def shadows(self, now: float) -> int:
        """Failed attempts that still count."""
        return sum(until > now for until, _ in self._shadows) if self._shadows else 0

    def booked(self, now: float) -> Booked:
        """Own work, as told to other gateways."""
        tokens = sum(booking.kv_tokens for booking in (*self._pending, *self._decoding))
        return Booked(self.prefill_s(now), tokens, self.inflight)

    # ---------------------------------------------------------------- what it reports

    def report(self, load: WorkerLoad, now: float, s_per_token: float, peers_s: float) -> None:
        """A load report; ``peers_s``: prefill seconds that other gateways have booked here.

        It tells of the moment at which it was made. What was booked here then is no one else's
        work, also if it has ended since.
        """
        made = self._made_at(load, now)
        extra = load.queued_prefill_tokens * s_per_token - self.prefill_s(now) - peers_s
        foreign = load.running + load.waiting - self.inflight
        for booking in (*self._past, *self._decoding):
            extra -= booking.prefill_s if booking.prefilled > made else 0.0
            foreign -= booking.ended is not None and booking.ended > made
        self.version += 1
        self._reported = Reported(load, now, max(0.0, extra), max(0, foreign))

    def _made_at(self, load: WorkerLoad, now: float) -> float:
        """When a report was made at the earliest, by this clock. The report that was fastest to
        come says when the worker started; one without an uptime is as good as new."""
        made = now
        if load.uptime_s > 0:
            self._started = min(self._started, now - load.uptime_s)
            made = self._started + load.uptime_s
        return max(now - _KEPT_PAST_S, made - _QUICKEST_S)

    def reported(self, now: float) -> Reported | None:
        """Its last report, if that is not stale."""
        known = self._reported
        return None if known is None or now - known.at > STALE_LOAD_S else known

    def load_age_s(self, now: float) -> float | None:
        """Seconds since its last report; None: it made none."""
        return None if self._reported is None else max(0.0, now - self._reported.at)

    def last_load(self) -> WorkerLoad | None:
        """Its last report, however old."""
        return None if self._reported is None else self._reported.load

    def kv_tokens_total(self) -> int:
        """Size of its KV cache; 0 = unknown."""
        load = self.last_load()
        blocks = load.blocks_total if load is not None and load.blocks_total else 0
        return (blocks or self.info.blocks_total) * self.info.block_size

    def kv_tokens_held(self, report: Reported | None) -> int:
        """KV tokens of running requests: as it reported, plus what was booked since."""
        if report is None:
            mine = (*self._pending, *self._decoding)
            return sum([booking.kv_tokens for booking in mine]) if mine else 0
        total = report.load.blocks_used * self.info.block_size
        for booking in (*self._pending, *self._decoding):
            if booking.begun > report.at:
                total += booking.kv_tokens
        return total

    def observe_tpot(self, itl_s: float) -> None:
        """Time between two tokens of an answer that has ended."""
        if itl_s > 0:
            change = _TPOT_WEIGHT * (itl_s - self.tpot_s)
            self.tpot_s = self.tpot_s + change if self.tpot_s else itl_s

    def token_s(self) -> float:
        """Seconds per output token of one sequence; 0 = unknown."""
        load = self.last_load()
        if not self.tpot_s and load is not None and load.decode_tokens_per_s > 0:
            return 1.0 / load.decode_tokens_per_s
        return self.tpot_s

    def host_token_s(self) -> float:
        """Seconds to load a token from host memory, as it measured; 0 = unknown."""
        load = self.last_load()
        rate = 0.0 if load is None else load.host_tokens_per_s
        return 1.0 / rate if rate > 0 else 0.0

    def restart(self, info: WorkerInfo) -> None:
        """A new incarnation. Leases of the old one stay booked until they end."""
        self.adopt(info)
        self._reported, self._started = None, inf
        self.breaker.reset()
        self.healthy, self.down_reason = True, ""

    def _drop_shadows(self, now: float) -> None:
        if self._shadows:
            self._shadows = [shadow for shadow in self._shadows if shadow[0] > now]
