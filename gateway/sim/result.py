"""What a simulation says: the fields of ``headwater simulate --format json``, times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

import msgspec

from gateway.sim.model import WorkerModel
from gateway.sim.replay import Served
from gateway.sim.trace import Trace


class Ttft(msgspec.Struct, frozen=True):
    """Times to first token, seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class PolicyResult(msgspec.Struct, frozen=True):
    """One policy on one trace."""

    policy: str
    hit_rate: float
    """Share of the prompts' tokens that were not computed again."""
    ttft: Ttft
    busiest_work: float
    """Prefill seconds of the busiest worker over the mean."""
    busiest_requests: float
    """Requests of the worker that got most, over the mean."""
    utilisation: float
    """Share of the workers' time that prefill took."""
    requests: list[int]
    """By worker."""
    end_s: float
    """From the first arrival until the last answer was complete."""


class Bounds(msgspec.Struct, frozen=True):
    """Figures that need no router."""

    infinite_hit_rate: float
    """One cache that sees everything and forgets nothing: no router can beat it."""
    pooled_hit_rate: float
    """One leaf-LRU with the memory of all workers: perfect placement without duplicates."""
    ttft_alone: Ttft
    """Nobody ever waits, with the hits of the infinite cache: less is impossible."""
    ttft_infinite: Ttft
    """One FIFO queue before all workers, with those hits."""
    ttft_pooled: Ttft
    """One FIFO queue with the hits of the pooled cache: the reference."""
    utilisation: float
    """Prefill work with the pooled cache's hits over the span of arrivals; from about 0.95 on no
    policy keeps up, and times depend on the length of the trace."""


class Simulation(msgspec.Struct, frozen=True):
    """Everything that was asked and found."""

    trace: str
    requests: int
    sessions: int | None
    """None: the trace names none; every request came at its own time."""
    block_size: int
    input_tokens: int
    output_tokens: int
    workers: int
    worker: WorkerModel
    load: float | None
    """As asked; None: the trace's own pace."""
    time_scale: float
    """Factor on the trace's arrival times."""
    seed: int
    bounds: Bounds
    policies: list[PolicyResult]


def ttft_of(times: Sequence[float]) -> Ttft:
    """Figures of at least one time."""
    ranked = sorted(times)
    return Ttft(
        sum(ranked) / len(ranked), *(percentile(ranked, share) for share in (0.5, 0.9, 0.99))
    )


def percentile(ranked: Sequence[float], share: float) -> float:
    """Of sorted values, linear between neighbours."""
    place = share * (len(ranked) - 1)
    low = floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def result_of(policy: str, trace: Trace, served: Served) -> PolicyResult:
    """The figures of a run."""
    workers = len(served.busy_s)
    requests = [0] * workers
    for worker in served.worker:
        requests[worker] += 1
    work = sum(served.busy_s)
    return PolicyResult(
        policy=policy,
        hit_rate=sum(served.cached_tokens) / trace.input_tokens,
        ttft=ttft_of(served.ttft_s),
        busiest_work=max(served.busy_s) * workers / work,
        busiest_requests=max(requests) * workers / len(trace.requests),
        utilisation=work / workers / served.end_s,
        requests=requests,
        end_s=served.end_s,
    )
