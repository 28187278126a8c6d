"""A worker as operators see it."""

from __future__ import annotations

from gateway.decision import WorkerStatus
from gateway.member import Member
from gateway.routing.base import Trust
from shared.load import WorkerLoad


def describe(
    member: Member,
    now: float,
    *,
    trust: tuple[Trust, str],
    index_blocks: int,
    index_host_blocks: int,
    prefill_s_per_token: float,
    prediction_error: float | None,
    learned_tokens: int,
) -> WorkerStatus:
    """A member as operators see it. Pure."""
    booked, load = member.booked(now), member.last_load() or WorkerLoad()
    return WorkerStatus(
        id=member.id,
        url=member.info.url,
        models=member.info.models,
        engine=member.info.engine,
        state=member.state(now),
        reason=member.reason(now),
        trust=trust[0],
        trust_reason=trust[1],
        block_size=member.info.block_size,
        epoch=member.info.epoch,
        inflight=member.inflight,
        booked_prefill_s=booked.prefill_s,
        booked_tokens=booked.decode_tokens,
        index_blocks=index_blocks,
        index_host_blocks=index_host_blocks,
        prefill_s_per_token=prefill_s_per_token,
        failure_rate=member.breaker.failure_rate(now),
        running=load.running,
        waiting=load.waiting,
        load_age_s=member.load_age_s(now),
        blocks_total=load.blocks_total or member.info.blocks_total,
        blocks_used=load.blocks_used,
        blocks_cached=load.blocks_cached,
        adapters=tuple(member.adapters),
        tokenizer=member.info.tokenizer,
        event_feed=member.info.event_feed,
        parity=member.parity.verdict,
        parity_reason=member.parity.reason,
        prediction_error=prediction_error,
        learned_tokens=learned_tokens,
        parity_fix=member.parity.fix,
    )
