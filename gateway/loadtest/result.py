"""What a run says: the fields of ``headwater bench --format json``, times in seconds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from gateway.loadtest.stats import Times, times_of

CLIENT_LAG_S = 0.02
CLIENT_BUSY = 0.8


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as its client saw it."""

    at: float
    """Seconds since the run began."""
    ttft_s: float | None
    """None: no content came."""
    total_s: float
    itl_s: float | None = None
    """Mean time between contents."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reported: bool = False
    """The server told ``cached_tokens``."""
    output_tokens: int = 0
    worker: str = ""
    error: str = ""


class Client(msgspec.Struct, frozen=True):
    """How the load generator itself fared."""

    busy: float
    """Share of a core."""
    lag_p99_s: float
    """By which its own timers were late."""
    limiting: bool
    """The figures may be the client's, not the cluster's."""

    @classmethod
    def of(cls, busy: float, lag_p99_s: float) -> Client:
        """Judge by both."""
        return cls(busy, lag_p99_s, busy > CLIENT_BUSY or lag_p99_s > CLIENT_LAG_S)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy, or the cluster as it is, in one round."""

    policy: str
    """Empty: whatever the cluster uses."""
    requests: int
    errors: int
    first_error: str
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    hit_rate: float | None
    """Cached prompt tokens over all, as engines report; None: nobody reports."""
    prompt_tokens: int
    ttft: Times | None
    itl: Times | None
    total: Times | None
    busiest: float | None
    """Requests of the busiest worker over the mean; None: the gateway names no workers."""
    workers: dict[str, int]
    client: Client


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one call."""

    url: str
    model: str
    workload: str
    seed: int
    concurrency: int | None
    """Sessions at a time; None: they came at a rate."""
    rate: float | None
    runs: list[Run]


def run_of(policy: str, done: Sequence[Done], seconds: float, client: Client) -> Run:
    """Sum up; ``done`` without the warm-up."""
    good = [one for one in done if not one.error]
    told = [one for one in good if one.reported]
    prompt = sum(one.prompt_tokens for one in told)
    workers = Counter(one.worker for one in good if one.worker)
    bad = [one.error for one in done if one.error]
    return Run(
        policy=policy,
        requests=len(done),
        errors=len(bad),
        first_error=bad[0] if bad else "",
        seconds=seconds,
        requests_per_s=len(good) / seconds if seconds else 0.0,
        output_tokens_per_s=sum(one.output_tokens for one in good) / seconds if seconds else 0.0,
        hit_rate=sum(one.cached_tokens for one in told) / prompt if prompt else None,
        prompt_tokens=sum(one.prompt_tokens for one in good),
        ttft=times_of([one.ttft_s for one in good if one.ttft_s is not None]),
        itl=times_of([one.itl_s for one in good if one.itl_s is not None]),
        total=times_of([one.total_s for one in good]),
        busiest=max(workers.values()) * len(workers) / workers.total() if workers else None,
        workers=dict(sorted(workers.items())),
        client=client,
    )
