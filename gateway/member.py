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

from gateway.booking import Booking, Reported, Speaker
from gateway.breaker import Breaker, Gate
from gateway.decision import Booked
from gateway.parity import Parity
from gateway.routing.base import READY, WorkerState
from shared.blocks import stride_of
from shared.load import AdapterInfo, WorkerInfo, WorkerLoad
from shared.types import WorkerId

STALE_LOAD_S = 5.0
"""A report older than this says nothing about now."""
_KEPT_PAST_S = 2.0
"""No report is thought to be older when it comes."""
_MINUTE_S = 60.0
_QUICKEST_S = 0.05
"""The fastest report may have taken this long."""
_TPOT_WEIGHT = 0.1
_PATIENCE_TOKENS = 8
"""Times the usual gap between two pieces of an answer: a longer one is silence."""
_UNKNOWN_TPOT_S = 0.01


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
    pending: dict[Booking, None] = field(default_factory=dict)
    """Own attempts that have shown no token yet, the first one first."""
    answering: dict[Booking, None] = field(default_factory=dict)
    """Those that have shown one."""
    kv_tokens: int = 0
    """KV tokens that all of these hold or were promised."""
    kv_tokens_since: int = 0
    """Those of the ones that began after the last report."""
    early: list[tuple[float, float]] = field(default_factory=list)
    """Shadows of attempts that failed early: (until, prefill seconds)."""
    last_report: Reported | None = None
    _pending_s: float | None = 0.0
    """Sum of the pending prefills in their order; None: it must be made anew."""
    _past: deque[Booking] = field(default_factory=deque)
    """Those that ended in the last 2 s, oldest first."""
    _started: float = inf
    """When the worker's uptime was 0, at the latest, by the reports of the last minute ..."""
    _started_before: float = inf
    """... and of the minute before."""
    _minute_ends: float = 0.0
    _prefill_ended: float = 0.0
    answered: float = -inf
    """When it last showed a first token, or a whole answer."""
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
        return len(self.pending) + len(self.answering)

    def state(self, now: float) -> WorkerState:
        """Whether it may be chosen."""
        if not self.healthy:
            return WorkerState.DOWN
        if self.drains or ((known := self.last_report) is not None and known.load.draining):
            return WorkerState.DRAINING
        if self.breaker.until is not None and self.breaker.gate(now) is Gate.OPEN:
            return WorkerState.EJECTED
        return READY

    @property
    def draining(self) -> bool:
        """No new requests, by somebody's wish or its own."""
        reported = self.last_report
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
        return not self.pending and not self.early and self.breaker.until is None

    def book(self, booking: Booking) -> None:
        """An attempt begins."""
        self.version += 1
        report, now = self.last_report, booking.begun
        if self.early:
            self._drop_shadows(now)
        booking.beside = len(self.pending) + len(self.answering)
        self.kv_tokens += booking.kv_tokens
        if report is not None:
            if now - report.at <= STALE_LOAD_S:
                booking.beside += report.foreign
            if now > report.at:
                self.kv_tokens_since += booking.kv_tokens
        self.pending[booking] = None
        if self._pending_s is not None:
            self._pending_s += booking.prefill_s

    def start_decoding(self, booking: Booking, now: float, speaker: Speaker | None = None) -> None:
        """Its first token came. Unknown and ended bookings are fine."""
        if booking in self.pending:
            booking.speaker = speaker
            self.version += 1
            del self.pending[booking]
            self._pending_s = None if self.pending else 0.0
            self.answering[booking] = None
            self._prefill_ended = booking.prefilled = now

    def served_with(self, booking: Booking) -> int:
        """How many it serves at this moment, for sure, where an attempt of its shows a token or its
        end. What came before that one does not wait any more."""
        served = len(self.answering)
        if booking in self.pending:
            for other in self.pending:
                served += 1
                if other is booking:
                    break
        return served

    def release(self, booking: Booking, now: float, *, failed: bool) -> bool:
        """The attempt ended; False: it had ended before, and nothing changes."""
        prefill_s = 0.0
        if booking in self.pending:
            del self.pending[booking]
            self._pending_s = None if self.pending else 0.0
            self._prefill_ended = booking.prefilled = now
            prefill_s = booking.prefill_s
        elif booking in self.answering:
            del self.answering[booking]
        else:
            return False
        self.version += 1
        self.kv_tokens -= booking.kv_tokens
        if self.last_report is not None and booking.begun > self.last_report.at:
            self.kv_tokens_since -= booking.kv_tokens
        if self.early:
            self._drop_shadows(now)
        booking.ended, past = now, self._past
        past.append(booking)
        while (past[0].ended or 0.0) < now - _KEPT_PAST_S:
            past.popleft()
        if failed and booking.begun + booking.expected_s > now:
            self.early.append((booking.begun + booking.expected_s, prefill_s))
        return True

    def prefill_s(self, now: float) -> float:
        """Prefill work booked here and not yet done, in seconds.

        Prefills run one after another: the first pending one has worked since the one before it
        ended. Once it is overdue it counts again, up to its whole length: it may be stuck.
        """
        total = 0.0
        if self.early:
            total = sum((prefill_s for until, prefill_s in self.early if until > now), 0.0)
        if not self.pending:
            return total
        pending_s = self._pending_s
        if pending_s is None:
            pending_s = self._pending_s = sum([booking.prefill_s for booking in self.pending])
        head = next(iter(self.pending))
        begun, ended = head.begun, self._prefill_ended
        done = now - (begun if begun > ended else ended)
        if done > head.prefill_s:
            done = 2 * head.prefill_s - done
        return total + pending_s - (done if done > 0.0 else 0.0)

    def silence_s(self, now: float) -> float:
        """How long the answers that have begun all say nothing, beyond what is usual, in seconds.

        Whatever holds up all of them holds up the next one, and what has lasted so long lasts as
        long again. One answer alone may have its own reasons: of n answers (n-1)/n counts.
        """
        count = len(self.answering)
        if count < 2:
            return 0.0
        patience_s = _PATIENCE_TOKENS * (self.token_s() or _UNKNOWN_TPOT_S)
        latest = 0.0
        for booking in self.answering:
            if booking.speaker is None or now - booking.speaker.last_at <= patience_s:
                return 0.0
            latest = max(latest, booking.speaker.last_at)
        # Engines may prefill first: that time is booked already.
        booked_s = sum([booking.prefill_s for booking in self.pending])
        return max(0.0, now - latest - patience_s - booked_s) * (count - 1) / count

    def shadows(self, now: float) -> int:
        """Failed attempts that still count."""
        return sum(until > now for until, _ in self.early) if self.early else 0

    def booked(self, now: float) -> Booked:
        """Own work, as told to other gateways."""
        return Booked(self.prefill_s(now) + self.silence_s(now), self.kv_tokens, self.inflight)

    # ---------------------------------------------------------------- what it reports

    def report(self, load: WorkerLoad, now: float, s_per_token: float) -> None:
        """A load report.

        It tells of the moment at which it was made. What was booked here then is no one else's
        work, also if it has ended since.
        """
        sent = self._sent_at(load, now)
        made = max(now - _KEPT_PAST_S, sent - _QUICKEST_S)  # at the earliest
        extra = load.queued_prefill_tokens * s_per_token - self.prefill_s(now)
        foreign = load.running + load.waiting - self.inflight
        for booking in (*self._past, *self.answering):
            extra -= booking.prefill_s if booking.prefilled > made else 0.0
            foreign -= booking.ended is not None and booking.ended > made
        self.version += 1
        self.last_report = Reported(load, now, sent, max(0.0, extra), max(0, foreign))
        live = (*self.pending, *self.answering)
        self.kv_tokens_since = sum(booking.kv_tokens for booking in live if booking.begun > now)

    def _sent_at(self, load: WorkerLoad, now: float) -> float:
        """When a report was made, by this clock, if the one that was fastest to come took no time:
        it says when the worker started. A report without an uptime is as good as new.

        Only the last two minutes count: clocks of two machines drift apart, and one that was halted
        has lost time.
        """
        if load.uptime_s <= 0:
            return now
        if now >= self._minute_ends:
            recent = now < self._minute_ends + _MINUTE_S
            self._started_before = self._started if recent else inf
            self._started, self._minute_ends = inf, now + _MINUTE_S
        self._started = min(self._started, now - load.uptime_s)
        sent = min(self._started, self._started_before) + load.uptime_s
        return max(now - _KEPT_PAST_S, sent)

    def outdated(self, load: WorkerLoad) -> bool:
        """Whether a later report of this incarnation has come before: there are two roads."""
        last = self.last_report
        return last is not None and 0 < load.uptime_s < last.load.uptime_s

    def reported(self, now: float) -> Reported | None:
        """Its last report, if that is not stale."""
        known = self.last_report
        return None if known is None or now - known.at > STALE_LOAD_S else known

    def load_age_s(self, now: float) -> float | None:
        """Seconds since its last report; None: it made none."""
        return None if self.last_report is None else max(0.0, now - self.last_report.at)

    def last_load(self) -> WorkerLoad | None:
        """Its last report, however old."""
        return None if self.last_report is None else self.last_report.load

    def kv_tokens_total(self) -> int:
        """Size of its KV cache; 0 = unknown."""
        load = self.last_load()
        blocks = load.blocks_total if load is not None and load.blocks_total else 0
        return (blocks or self.info.blocks_total) * self.info.block_size

    def observe_tpot(self, itl_s: float) -> None:
        """Time between two tokens of an answer that has ended."""
        if itl_s > 0:
            change = _TPOT_WEIGHT * (itl_s - self.tpot_s)
            self.tpot_s = self.tpot_s + change if self.tpot_s else itl_s

    def token_s(self) -> float:
        """Seconds per output token of one sequence; 0 = unknown."""
        report = self.last_report
        if not self.tpot_s and report is not None and report.load.decode_tokens_per_s > 0:
            return 1.0 / report.load.decode_tokens_per_s
        return self.tpot_s

    def restart(self, info: WorkerInfo) -> None:
        """A new incarnation. Leases of the old one stay booked until they end."""
        self.adopt(info)
        self.last_report, self._started, self._started_before = None, inf, inf
        self.breaker.reset()
        self.healthy, self.down_reason = True, ""

    def _drop_shadows(self, now: float) -> None:
        if self.early:
            self.early = [shadow for shadow in self.early if shadow[0] > now]
