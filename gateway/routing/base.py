"""What a policy sees and returns. Same arguments, own state and RNG state: same ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Protocol

import msgspec

from gateway.routing.pressure import NOTHING, Offered
from shared.blocks import GRANULE
from shared.load import WorkerLoad
from shared.types import BlockKey, RequestId, WorkerId


class Trust(StrEnum):
    """How far the index is believed for one worker."""

    EXACT = "exact"
    """Its events flow without a gap."""
    LEARNED = "learned"
    """Known only from what we routed and what ``cached_tokens`` said."""
    BLIND = "blind"
    """Nothing can be known: balanced by load."""


EXACT, LEARNED, BLIND = Trust.EXACT, Trust.LEARNED, Trust.BLIND
"""For decisions: looking a member up in its class takes as long as a call."""


class WorkerState(StrEnum):
    """Whether a worker may be chosen."""

    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    EJECTED = "ejected"


READY = WorkerState.READY
"""For decisions, too."""


class Query(msgspec.Struct, frozen=True):
    """One request, as far as routing is concerned."""

    request_id: RequestId
    model: str
    prompt_tokens: int
    """0 if not known (no tokenizer)."""
    max_tokens: int
    """What the client allows; 0 = no limit given."""
    arrived: float
    """Monotonic seconds."""
    keys: Sequence[BlockKey] = ()
    """One key per full granule of the prompt; of a list of prompts, of the first one."""
    plain_keys: Sequence[BlockKey] = ()
    """Those of the same prompt without its cache salt; empty if it has none."""
    adapter: str = ""
    """Scope of the LoRA adapter that is asked; empty: the model itself."""
    tenant: str = ""
    session: str = ""
    priority: int = 0
    deadline: float | None = None
    """Monotonic seconds."""
    prompts: tuple[Query, ...] = ()
    """Of a list of prompts, which goes to one worker: a query for each. Empty: it is one prompt."""


def key_tokens(query: Query) -> int:
    """Tokens that a query's keys stand for: about its length, where no tokenizer has counted it."""
    if not query.prompts:
        return GRANULE * len(query.keys)
    return GRANULE * sum(len(prompt.keys) for prompt in query.prompts)


class WorkerView(msgspec.Struct, frozen=True):
    """One worker at the moment of a decision."""

    id: WorkerId
    state: WorkerState
    trust: Trust
    block_size: int
    inflight: int
    """Attempts booked by this gateway and not finished."""
    booked_prefill_s: float
    """Estimated seconds of prefill work ahead of a new request, own bookings and others'."""
    booked_decode_tokens: int
    """KV tokens held or promised to running and booked requests."""
    prefill_s_per_token: float
    """Learned or pooled; > 0."""
    overhead_s: float
    """Fixed seconds per request before its first token."""
    failure_rate: float
    """Recent share of failed attempts, 0..1."""
    failure_s: float = 0.5
    """How long an attempt that fails there takes to fail."""
    host_s_per_token: float = 0.0
    """To load a cached token from host memory: measured there, else as configured."""
    kv_tokens_total: int = 0
    """0 = unknown."""
    load: WorkerLoad | None = None
    load_age_s: float = 0.0
    foreign: int = 0
    """Running and waiting requests that the worker reports beyond ours."""
    tpot_s: float = 0.0
    """Seconds per output token of one sequence; 0 = unknown."""
    release_tokens_per_s: float = 0.0
    """Expected rate at which running requests give KV tokens back; 0 = unknown."""
    pool_busy: float = 0.0
    """Share of its pool's time that prefill takes; beyond 1 the pool cannot keep up."""
    fresh: bool = False
    """It joined a pool of others a moment ago: its speed is a guess, and many requests at once
    would be a risk."""
    decoding: int = 0
    """Those of ``inflight`` that have shown a token: they have a place."""
    at_once: int = 4
    """The most that a worker of its pool was seen to serve side by side, at least 4."""
    service_s: float = 0.0
    """What one request takes in its pool from beginning to end; 0 = unknown."""
    offered: Offered = NOTHING
    """What it was sent of late."""

    @property
    def requests(self) -> int:
        """Everything it is busy with, ours and others'."""
        return self.inflight + self.foreign

    @property
    def available(self) -> bool:
        """May take new requests."""
        return self.state is WorkerState.READY


class Candidate(msgspec.Struct, frozen=True):
    """A worker that could serve the query, and what of its prompt the worker holds."""

    worker: WorkerView
    matched_tokens: int
    """Usable cached tokens (``shared.blocks.usable_tokens``), promised ones included."""
    promised_tokens: int = 0
    """The part of ``matched_tokens`` that is only promised: booked there, not yet computed."""
    shared_tokens: float = 0.0
    """The part of the uncached tokens whose computation pays itself back, since the prefix is
    popular (``gateway.routing.branches``)."""
    branches: float = 1.0
    """How many different prompts went on below the first of the uncached tokens."""
    new_kv_tokens: int = 0
    """KV tokens the request will need on the device there beyond those it matches on it: prompt and
    expected answer."""
    host_tokens: int = 0
    """The part of ``matched_tokens`` that must be loaded from the worker's host memory."""

    @property
    def load_s(self) -> float:
        """Seconds to load that part; a worker computes anew what would take longer to load."""
        if not self.host_tokens:
            return 0.0
        worker = self.worker
        return self.host_tokens * min(worker.host_s_per_token, worker.prefill_s_per_token)


class Scored(msgspec.Struct, frozen=True):
    """A candidate with its cost; policies that do not think in seconds still order by ``cost``."""

    candidate: Candidate
    cost: float
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Named terms that add up to ``cost`` (seconds for the ``cost`` policy)."""


class Policy(Protocol):
    """Orders candidates. Stateful policies (round robin) keep their state in the object."""

    @property
    def name(self) -> str:
        """As in ``--policy`` and ``x-headwater-policy``."""
        ...

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """All candidates, best first: the order is the retry plan. Empty only for empty input."""
        ...
