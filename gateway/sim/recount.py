"""``headwater replay``: a gateway's recorded traffic under other policies. Pure.

Two answers, which are not the same. *Decided again*: each recorded decision by itself, on the
candidates as they were. *Served again*: all of the traffic, simulated from empty caches on workers
fitted to the recorded times, under each policy and as it was recorded; how far the latter is from
what was measured says how far to believe the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.sim.fit import fit_memory, fit_speed, placed, told_memory
from gateway.sim.model import WorkerModel
from gateway.sim.recorded import trace_of
from gateway.sim.redecide import Redecided, redecide
from gateway.sim.replay import Factory, Replay, Served
from gateway.sim.result import Ttft, ttft_of
from gateway.sim.trace import Trace
from gateway.sim.turns import RECORDED
from gateway.tracefile import Traced


class Measured(msgspec.Struct, frozen=True):
    """What was recorded."""

    requests: int
    hit_rate: float
    """Delivered over prompt tokens."""
    ttft: Ttft | None
    """None: no time to first token was recorded."""
    policies: tuple[str, ...]


class Replayed(msgspec.Struct, frozen=True):
    """One policy over the whole traffic, simulated."""

    policy: str
    hit_rate: float
    ttft: Ttft
    prefill_s: float
    """Of all workers together."""
    saved_s: float
    """Less prefill than as recorded (simulated, too); below 0: more."""
    busiest: float
    """Prefill of the busiest worker over the mean."""


class ReplayResult(msgspec.Struct, frozen=True):
    """Everything that was asked and found; the fields of ``--format json``."""

    source: str
    measured: Measured
    workers: int
    block_size: int
    model: WorkerModel
    """Fitted."""
    memory_from: str
    """``given``, ``told`` by the workers, or ``fitted`` to the recorded hits."""
    decided: list[Redecided]
    served: list[Replayed]
    """First as recorded."""


def replay(
    source: str,
    requests: Sequence[Traced],
    policies: Mapping[str, Factory],
    *,
    block_size: int,
    kv_blocks: int = 0,
    seed: int = 1,
    on_progress: Callable[[str], None] = lambda what: None,
) -> ReplayResult:
    """Replay answered requests (``recorded.answered``), at least one.

    :param kv_blocks: of each worker; 0: as the workers told, or fitted.
    """
    trace = trace_of(requests, block_size)
    names = sorted({one.worker for one in requests})
    places = {at: names.index(one.worker) for at, one in enumerate(requests)}
    on_progress("fitting speed and memory of the workers")
    model = fit_speed(requests, WorkerModel(kv_blocks=max(1, kv_blocks)))
    delivered = sum(one.cached_tokens for one in requests)
    if kv_blocks:
        blocks, memory_from = kv_blocks, "given"
    elif told := told_memory(requests, block_size):
        blocks, memory_from = max(told, trace.most_blocks), "told"
    else:
        blocks, memory_from = fit_memory(trace, model, len(names), places, delivered), "fitted"
    model = msgspec.structs.replace(model, kv_blocks=blocks)
    recorded = placed(trace, model, len(names), places, blocks)
    base = sum(recorded.busy_s)
    served = [_row(RECORDED, trace, recorded, base)]
    for name, factory in policies.items():
        on_progress(f"{name}: {len(requests)} requests simulated")
        run = Replay(trace, model, len(names), factory, 1.0, seed).run()
        served.append(_row(name, trace, run, base))
    times = [one.ttft_s for one in requests if one.ttft_s is not None]
    prompt = sum(one.prompt_tokens for one in requests)
    return ReplayResult(
        source=source,
        measured=Measured(
            requests=len(requests),
            hit_rate=delivered / prompt if prompt else 0.0,
            ttft=ttft_of(times) if times else None,
            policies=tuple(sorted({one.policy for one in requests if one.policy})),
        ),
        workers=len(names),
        block_size=block_size,
        model=model,
        memory_from=memory_from,
        decided=redecide(requests, policies, seed),
        served=served,
    )


def _row(name: str, trace: Trace, run: Served, base: float) -> Replayed:
    work = sum(run.busy_s)
    return Replayed(
        policy=name,
        hit_rate=sum(run.cached_tokens) / trace.input_tokens,
        ttft=ttft_of(run.ttft_s),
        prefill_s=work,
        saved_s=0.0 if base == work else base - work,
        busiest=max(run.busy_s) * len(run.busy_s) / work,
    )
