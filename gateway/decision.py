"""What the router hands out and takes back: plain values, no behaviour beyond reading them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gateway.parity import Verdict
from gateway.records import Outcome, Shadow
from gateway.routing.base import Query, Scored, Trust, WorkerState
from shared.errors import ApiError
from shared.openai import Usage
from shared.types import WorkerId


class Overlap(msgspec.Struct, frozen=True):
    """How much of a prompt was known, and where, at the moment of a decision. All in tokens."""

    matchable_tokens: int = 0
    """What could match at best: whole blocks without the last token."""
    block_size: int = 16
    """Of the worker that could reuse most of the prompt."""
    seen_tokens: int = 0
    """Longest prefix this gateway ever saw served (bounded memory)."""
    available_tokens: int = 0
    """Best usable overlap on any live worker, draining and ejected ones included."""
    draining_tokens: int = 0
    """The part of ``available_tokens`` that no worker open to new requests holds."""
    isolated_tokens: int = 0
    """What live workers hold beyond ``available_tokens``, but under another cache salt."""


class Route(msgspec.Struct, frozen=True):
    """A decision: the candidates in the order in which they should be tried."""

    query: Query
    policy: str
    order: tuple[Scored, ...]
    overlap: Overlap
    decided: float
    """Monotonic seconds."""
    predicted_ttft_s: float
    """From the decision to the first token, on the chosen worker."""
    round_robin: Shadow | None = None
    """What taking turns would have chosen; ``ttft_s`` from the decision on."""
    lookup_s: float = 0.0
    """What finding the prompt in the index took; 0 without a timer."""

    @property
    def chosen(self) -> Scored:
        """The worker to try now."""
        return self.order[0]

    @property
    def worker(self) -> WorkerId:
        """Id of the chosen worker."""
        return self.order[0].candidate.worker.id

    @property
    def matched_tokens(self) -> int:
        """Usable overlap expected on the chosen worker."""
        return self.order[0].candidate.matched_tokens


@dataclass(frozen=True, slots=True)
class Reject:
    """Nobody can take the request; ``error`` is what the client sees."""

    error: ApiError
    reason: str
    """``no_worker``, ``model_not_found`` or ``all_tried``: bounded, fit for a metric label."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What a caller must know to turn a prompt of this model into keys."""

    canonical: str
    """The name that enters the hash scope."""
    tokenizer: str
    """Fingerprint of the workers' tokenizer bundle; empty = unknown."""
    workers: tuple[WorkerId, ...]
    min_block_size: int
    max_model_len: int
    """Longest prompt + answer that some worker takes; 0 = unknown."""
    adapter: str = ""
    """Scope of the adapter that answers to the name; empty: the model itself does. Of several
    revisions it is the one that most workers have: the others' caches count as empty."""
    shares_prefixes: bool = False
    """All its workers can let a salt enter behind an approved beginning."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as ``/admin/workers`` and the metrics show it."""

    id: WorkerId
    url: str
    models: tuple[str, ...]
    engine: str
    state: WorkerState
    reason: str
    """Why it is not ready; empty if it is."""
    trust: Trust
    trust_reason: str
    block_size: int
    epoch: int
    inflight: int
    booked_prefill_s: float
    booked_tokens: int
    index_blocks: int
    index_host_blocks: int
    """Those in its host memory."""
    prefill_s_per_token: float
    failure_rate: float
    running: int
    """As the worker said last."""
    waiting: int
    load_age_s: float | None
    """None = it never told its load."""
    blocks_total: int = 0
    """Of its KV cache; 0 = unknown."""
    blocks_used: int = 0
    """Held by running requests, as it said last."""
    blocks_cached: int = 0
    """Reusable contents that nobody holds."""
    adapters: tuple[str, ...] = ()
    """Names of its LoRA adapters."""
    tokenizer: str = ""
    """Fingerprint of its tokenizer and chat template; empty = not known."""
    event_feed: bool = False
    """It publishes cache events."""
    parity: Verdict = Verdict.UNPROVEN
    """Whether it makes the same tokens of a prompt as the gateway."""
    parity_reason: str = ""
    """Why that is different or not proved; empty if it is equal."""
    prediction_error: float | None = None
    """Share of the prompt tokens, predicted or delivered, that were predicted wrongly of late; None
    = too little was compared."""
    learned_tokens: int = 0
    """What its cache holds, as was learned from its answers; 0 where its events tell."""
    parity_fix: str = ""
    """What can be done about a difference."""


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, as its caller saw it."""

    outcome: Outcome
    status: int
    """HTTP status of the worker's answer, or the one the client gets if there was none."""
    silent: bool = False
    """The worker sent nothing for too long, and was given up."""
    usage: Usage | None = None
    output_tokens: int = 0
    """Content events seen; used where the engine reports no usage."""
    itl_s: float | None = None
    """Mean time between content events, seconds."""
    final: bool = True
    """No further attempt follows."""
    route: str = ""
    """Route of the request, e.g. ``/v1/chat/completions``."""
    wall_at: float = 0.0
    """Wall clock when the request arrived, seconds since the epoch."""
    client_id: str = ""
    """The client's own ``x-request-id``; empty if it sent none that is plain."""


class Booked(msgspec.Struct, frozen=True):
    """Work that one gateway has booked on one worker; all values >= 0."""

    prefill_s: float
    decode_tokens: int
    count: int
