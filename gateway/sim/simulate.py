"""A trace under several policies, with the bounds beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.sim.bounds import (
    hit_rate,
    infinite_hits,
    pooled_hits,
    queue_ttft,
    time_scale,
    work_s,
)
from gateway.sim.model import WorkerModel
from gateway.sim.replay import Factory, Replay
from gateway.sim.result import Bounds, PolicyResult, Simulation, result_of, ttft_of
from gateway.sim.trace import Trace

Progress = Callable[[str, int], None]
"""Policy, and how many of its requests have been answered."""


def simulate(
    name: str,
    trace: Trace,
    model: WorkerModel,
    workers: int,
    policies: Mapping[str, Factory],
    *,
    load: float | None = None,
    seed: int = 1,
    on_progress: Progress = lambda policy, done: None,
) -> Simulation:
    """Run each policy by itself on the same arrivals; equal arguments give an equal result.

    :param load: how busy the workers would be under a perfect router; None: the trace's own pace.
    """
    scale = 1.0 if load is None else time_scale(trace, model, workers, load)

    def run(policy: str, factory: Factory) -> PolicyResult:
        replay = Replay(trace, model, workers, factory, scale, seed)
        return result_of(policy, trace, replay.run(lambda done: on_progress(policy, done)))

    return Simulation(
        trace=name,
        requests=len(trace.requests),
        sessions=trace.sessions,
        block_size=trace.block_size,
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        workers=workers,
        worker=model,
        load=load,
        time_scale=scale,
        seed=seed,
        bounds=bounds_of(trace, model, workers, scale),
        policies=[run(policy, factory) for policy, factory in policies.items()],
    )


def bounds_of(trace: Trace, model: WorkerModel, workers: int, scale: float) -> Bounds:
    """The figures that need no router."""
    infinite = infinite_hits(trace)
    pooled = pooled_hits(trace, workers * model.kv_blocks)
    alone = [
        model.prefill_s(request.input_tokens - hit, request.input_tokens)
        for request, hit in zip(trace.requests, infinite, strict=True)
    ]
    return Bounds(
        infinite_hit_rate=hit_rate(trace, infinite),
        pooled_hit_rate=hit_rate(trace, pooled),
        ttft_alone=ttft_of(alone),
        ttft_infinite=ttft_of(queue_ttft(trace, infinite, model, workers, scale)),
        ttft_pooled=ttft_of(queue_ttft(trace, pooled, model, workers, scale)),
        utilisation=work_s(trace, pooled, model) / (workers * trace.span_s * scale),
    )
