"""What a policy sees of a worker: its own state and what is known of its pool, in one flat pass.

Every decision makes a view of each busy worker, so nothing here is looked up twice, and what only
changes when something happens (sums of bookings, medians of rates) is kept where it happens.
"""

from __future__ import annotations

import msgspec

from gateway.decision import Booked
from gateway.member import STALE_LOAD_S, Member
from gateway.routing.base import Trust, WorkerState, WorkerView
from gateway.routing.pressure import Offered

SETTLED_S = 30.0
"""So long a worker that joins a pool is new there: compiling, filling its caches."""
_NEW_PACE = 0.5
"""Its assumed speed meanwhile, as a share of what is known of it or its pool."""
_MIN_OUTPUT = 16.0


class PoolFacts(msgspec.Struct, frozen=True):
    """What the workers of one pool have in common at a moment; see :class:`WorkerView`."""

    overhead_s: float
    busy: float
    at_once: int
    service_s: float
    usual_output: float
    """Tokens."""
    host_s_per_token: float
    """As configured."""


def look(
    member: Member,
    trust: Trust,
    now: float,
    pool: PoolFacts,
    *,
    state: WorkerState,
    s_per_token: float,
    offered: Offered,
    peers: Booked | None,
) -> WorkerView:
    """A worker at this moment. Pure.

    :param state: of the worker, then.
    :param peers: what other gateways have booked there; None: there are none.
    """
    info, breaker, report = member.info, member.breaker, member.last_report
    load, load_age_s, blocks = None, 0.0, info.blocks_total
    tpot_s, host_s_per_token = member.tpot_s, pool.host_s_per_token
    others_s, foreign, held = 0.0, 0, member.kv_tokens
    if report is not None:
        load, load_age_s = report.load, now - report.at
        # These hold however old they are.
        blocks = load.blocks_total or blocks
        if not tpot_s and load.decode_tokens_per_s > 0:
            tpot_s = 1.0 / load.decode_tokens_per_s
        if load.host_tokens_per_s > 0:
            host_s_per_token = 1.0 / load.host_tokens_per_s
        if load_age_s > STALE_LOAD_S:
            load, load_age_s = None, 0.0
        else:
            foreign = report.foreign
            held = load.blocks_used * info.block_size + member.kv_tokens_since
            others_s = report.unbooked_prefill_s(now)
    if peers is not None:
        # Mostly the same work, which either of the two may have told first.
        others_s = max(others_s, peers.prefill_s)
        foreign = max(foreign, peers.count)
        held += peers.decode_tokens if load is None else 0
    if member.early:
        foreign += member.shadows(now)
    kv_tokens_total, release_tokens_per_s = blocks * info.block_size, 0.0
    if kv_tokens_total and tpot_s:
        release_tokens_per_s = held / (tpot_s * max(_MIN_OUTPUT, pool.usual_output))
    decoding = len(member.answering)
    fresh = member.newcomer and now - member.joined < SETTLED_S
    # In the order of the fields: so many names would take four times as long.
    return WorkerView(
        member.id,
        state,
        trust,
        info.block_size,
        len(member.pending) + decoding,  # inflight
        member.prefill_s(now) + others_s + member.silence_s(now),  # booked_prefill_s
        held,  # booked_decode_tokens
        s_per_token / _NEW_PACE if fresh else s_per_token,  # prefill_s_per_token
        pool.overhead_s,
        breaker.failure_rate(now) if breaker.failing else 0.0,
        breaker.lost_s,  # failure_s
        host_s_per_token,
        kv_tokens_total,
        load,
        load_age_s,
        foreign,
        tpot_s,
        release_tokens_per_s,
        pool.busy,
        fresh,
        decoding,
        pool.at_once,
        pool.service_s,
        offered,
    )
