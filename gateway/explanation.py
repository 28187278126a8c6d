"""A decision in JSON terms: who could serve a request, at what cost, and why one does. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from gateway.decision import Reject, Route
from gateway.reasons import in_words, why
from gateway.routing.base import Scored


def told(decision: Route | Reject) -> dict[str, Any]:
    """The whole decision; ``parts`` of a worker add up to its ``cost_s``."""
    if isinstance(decision, Reject):
        error = decision.error.body()["error"]
        return {"choice": None, "reason": decision.reason, "reject": error, "workers": []}
    reason = why(decision)
    sentence = in_words(
        reason,
        worker=decision.worker,
        policy=decision.policy,
        matched=decision.matched_tokens,
        prompt=decision.query.prompt_tokens,
    )
    return {
        "choice": decision.worker,
        "policy": decision.policy,
        "matched_tokens": decision.matched_tokens,
        "predicted_ttft_s": decision.predicted_ttft_s,
        "overlap": structs.asdict(decision.overlap),
        "reason": sentence,
        "reason_code": reason.code,
        "reject": None,
        "workers": workers_told(decision.order),
    }


def workers_told(order: Sequence[Scored]) -> list[dict[str, Any]]:
    """Candidates in their order."""
    return [
        {
            "id": scored.candidate.worker.id,
            "state": scored.candidate.worker.state.value,
            "trust": scored.candidate.worker.trust.value,
            "matched_tokens": scored.candidate.matched_tokens,
            "host_tokens": scored.candidate.host_tokens,
            "cost_s": scored.cost,
            "parts": dict(scored.parts),
            "inflight": scored.candidate.worker.inflight,
        }
        for scored in order
    ]
