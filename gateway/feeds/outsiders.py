"""An address that has never said who it is, in the form in which operators see workers."""

from __future__ import annotations

from gateway.decision import WorkerStatus
from gateway.discovery.base import address_of
from gateway.feeds.members import Member
from gateway.routing.base import Trust, WorkerState
from shared.types import WorkerId


def outsider(member: Member) -> WorkerStatus:
    """Down, with what the last probe met; its name is its address."""
    return WorkerStatus(
        id=member.claimed or WorkerId(address_of(member.url)),
        url=member.url,
        models=(),
        engine="",
        state=WorkerState.DOWN,
        reason=member.reason,
        trust=Trust.BLIND,
        trust_reason="it has never answered",
        block_size=0,
        epoch=0,
        inflight=0,
        booked_prefill_s=0.0,
        booked_tokens=0,
        index_blocks=0,
        index_host_blocks=0,
        prefill_s_per_token=0.0,
        failure_rate=0.0,
        running=0,
        waiting=0,
        load_age_s=None,
        parity_reason="it has never answered",
    )
