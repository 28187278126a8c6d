"""What a report says: plain values whose JSON encoding is the report's JSON form."""

from __future__ import annotations

import msgspec

Number = float | None
"""None: there was nothing to measure."""

DEPTHS = ("none", "partial", "full", "unknown")
"""How much of what could match was delivered; ``unknown``: the engine did not say."""


class Spread(msgspec.Struct, frozen=True):
    """A distribution in seconds."""

    count: int = 0
    mean: Number = None
    p50: Number = None
    p90: Number = None
    p99: Number = None


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Final attempts, one per request: all of them or one group."""

    totals: dict[str, int]
    """``requests`` and the sum of every term of ``TokenFlow``; they close exactly."""
    rates: dict[str, Number]
    """``available captured delivered`` as a share of ``prompt``, 0..1."""
    lookups: dict[str, int]
    """Requests by what the look-up gave; the four add up to ``requests``."""
    ttft_s: dict[str, Spread]
    """By depth, and ``all``."""
    itl_s: dict[str, Spread]
    """Mean time between two tokens of a request, by depth, and ``all``."""


class Group(Section, frozen=True, kw_only=True):
    """The requests that share the values of the ``--by`` fields."""

    key: dict[str, str]


class ModelRate(msgspec.Struct, frozen=True):
    """Seconds that one cold prompt token costs, by the ledger's own cold requests."""

    model: str
    cold_requests: int
    s_per_token: Number
    method: str
    """``slope`` or ``median`` (see ``Saved.how``), ``none`` without a cold request."""
    tokens: int
    prefill_s: Number


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What was not computed again."""

    tokens: int
    prefill_s: Number
    """Estimated; None if no model had a cold request to compare with."""
    ttft_reduction_percent: dict[str, Number]
    """``hit_vs_none`` and ``full_vs_none`` compare mean TTFT as measured; ``per_request`` is the
    mean over hits of estimated seconds saved / (TTFT + seconds saved)."""
    how: str
    models: list[ModelRate]


class WorkerShare(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part."""

    worker: str
    attempts: int
    failed: int
    requests: int
    prompt: int
    delivered: int
    computed: int
    """``prompt - delivered``."""
    stale_index: int
    """Tokens that it had dropped although the index said otherwise."""
    ttft_p50_s: Number
    ttft_p90_s: Number
    trust: dict[str, int]
    """Requests by trust state of the index for this worker."""


class Balance(msgspec.Struct, frozen=True):
    """How evenly the workers named in the ledger were used."""

    workers: list[WorkerShare]
    max_over_mean: dict[str, Number]
    """Of ``requests``, ``prompt`` and ``computed`` tokens; 1 is even."""


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a family whose prompts are alike for ``tokens`` tokens."""

    tokens: int
    requests: int
    prompt: int
    delivered: int
    rate: Number
    ways: int
    """Different continuations known within the next ``tokens`` tokens; 0: it ends before."""
    diverges_at: Number
    """Median length that its requests share with any earlier prompt, of those that part with all
    earlier ones before the next branch; None: hardly any does."""
    branches: list[Branch]
    """The largest of them."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose prompts begin alike."""

    family: str
    requests: int
    prompt: int
    delivered: int
    rate: Number
    workers: int
    diverges_at: Number = None
    """Median length in tokens that a request shares with any earlier prompt."""
    tree: list[Branch] = []
    """Where it branches, from its first tokens on; for the largest families."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that arrived within one step of the timeline."""

    at: float
    """Its beginning, seconds since the epoch."""
    totals: dict[str, int]
    ttft_hit_s: Number
    """Median of those that reused something."""
    ttft_none_s: Number
    """Median of those that reused nothing."""


class TrustShare(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's requests by how far the index was believed for it, step by step."""

    worker: str
    exact: list[int]
    learned: list[int]
    blind: list[int]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The same over time, in equal steps; steps without requests are there too."""

    step_s: float
    moments: list[Moment]
    trust: list[TrustShare]


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """The same requests under another policy."""

    policy: str
    requests: int
    """Those whose record says what the other policy would have done."""
    matched: int
    """Tokens that the chosen workers held, as far as the gateway knew."""
    other_matched: int
    """Tokens that the other policy's choices held at the same moments."""
    ttft_mean_s: Number
    """Predicted for the workers chosen."""
    other_ttft_mean_s: Number
    """Predicted for the other policy's choices by the same model."""
    saved_prefill_s: Number
    """Prefill of the tokens in between, at the price in ``Saved``; None if there is no price."""
    how: str


class Attempts(msgspec.Struct, frozen=True, kw_only=True):
    """Retries."""

    attempts: int
    retried_requests: int
    by_attempts: dict[str, int]
    """Requests by how many attempts they took; "0": rejected without one."""
    retry_reasons: dict[str, int]
    """Outcomes of the attempts that were not the last."""


class Ratio(msgspec.Struct, frozen=True):
    """Requests whose ratio lies between two bounds; None: no bound on that side."""

    low: Number
    high: Number
    requests: int


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the index promised against what the engine delivered, where it told."""

    requests: int
    exact: int
    promised_too_much: int
    promised_too_little: int
    mean_abs_error_tokens: Number
    error_percent: Number
    """``(stale_index + token_mismatch + gained) / prompt * 100``."""
    ttft_requests: int
    ttft_mean_abs_error_s: Number
    ttft_median_ratio: Number
    """Predicted TTFT / actual TTFT."""
    ttft_ratios: list[Ratio]
    """How that ratio is spread; the counts add up to ``ttft_requests``."""


class Skipped(msgspec.Struct, frozen=True):
    """A line that could not be read and is in no sum."""

    file: str
    line: int
    reason: str


class Report(Section, frozen=True, kw_only=True):
    """Everything, over all requests of the time range and per group."""

    version: int = 1
    since: Number
    first_at: Number
    last_at: Number
    files: list[str]
    records: int
    skipped_lines: int
    skipped: list[Skipped]
    """The first of them."""
    untold_requests: int
    """Answered requests whose engine did not tell ``cached_tokens``."""
    dropped_records: int
    """Records that gateways could not keep."""
    percentiles: str
    """``exact``, or ``approximate`` for very many records."""
    by: list[str]
    groups: list[Group]
    saved: Saved
    balance: Balance
    families: list[Family]
    timeline: Timeline
    counterfactual: Counterfactual
    reasons: dict[str, int]
    """Requests by why their worker was chosen (``gateway.reasons.CODES``); "": not recorded."""
    outcomes: dict[str, int]
    statuses: dict[str, int]
    attempts: Attempts
    prediction: Prediction
