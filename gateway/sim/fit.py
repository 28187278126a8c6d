"""A model of the workers from what a gateway recorded: speed and memory, fitted to its times. Pure.

first token    quick ones among those that computed much: overhead + uncached / rate. Quick
               ones, since the others waited for somebody
between tokens what a sequence takes where few others decode
memory         what the workers told; else the most with which the recorded placement hits no
               more often than was delivered: what was never full may be of any size, and a
               policy that spreads prompts wider must not be charged for memory that nobody
               saw run out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import log2
from statistics import median

import msgspec

from gateway.sim.model import WorkerModel
from gateway.sim.replay import Replay, Served
from gateway.sim.result import percentile
from gateway.sim.trace import Trace
from gateway.sim.turns import RecordedPlaces
from gateway.tracefile import Traced

_BINS_PER_DOUBLING = 2
_LEAST_IN_BIN = 3
_QUICK = 0.15
"""This quantile of the times in a bin is taken for one without a wait."""
_LEAST_SAMPLES = 16
_STEPS = 12
_HITS_NOISE = 0.002
"""Share of the prompt tokens by which hits differ for other reasons (prompts served at once)."""
_FULLEST = 1 << 20
"""Blocks: nothing is evicted."""


def fit_speed(requests: Sequence[Traced], default: WorkerModel) -> WorkerModel:
    """Prefill rate, overhead and time per token; those of ``default`` where too little is known."""
    samples = sorted(
        (max(1, one.prompt_tokens - one.cached_tokens), one.ttft_s)
        for one in requests
        if one.ttft_s is not None and one.prompt_tokens
    )
    rate, overhead_s = default.prefill_tokens_per_s, default.overhead_s
    if len(samples) >= _LEAST_SAMPLES:
        points = _quick(samples)
        slopes = [
            (two[1] - one[1]) / (two[0] - one[0])
            for at, one in enumerate(points)
            for two in points[at + 1 :]
            if two[0] - one[0] >= 64
        ]
        slope = median(slopes) if slopes else 0.0
        if slope > 0:
            rate = 1.0 / slope
            overhead_s = max(0.0, median(y - slope * x for x, y in points))
    gaps = sorted(one.itl_s for one in requests if one.itl_s)
    token_s = percentile(gaps, 0.2) if gaps else default.token_s
    return msgspec.structs.replace(
        default,
        prefill_tokens_per_s=rate,
        overhead_s=overhead_s,
        token_s=max(1e-5, token_s),
    )


def _quick(samples: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """One point per doubling of the tokens: their middle, and a time without a wait."""
    points = []
    for _, same in groupby(samples, lambda sample: int(log2(sample[0]) * _BINS_PER_DOUBLING)):
        part = list(same)
        if len(part) >= _LEAST_IN_BIN:
            times = sorted(time for _, time in part)
            points.append((median(tokens for tokens, _ in part), percentile(times, _QUICK)))
    return points


def fit_memory(
    trace: Trace,
    model: WorkerModel,
    workers: int,
    places: Mapping[int, int],
    delivered_tokens: int,
    on_step: Callable[[int], None] = lambda step: None,
) -> int:
    """Most blocks per worker with which the recorded placement hits as often as the engines said.

    Where nothing was ever evicted that is as many as there are blocks in all prompts and answers.
    """
    most = min(_FULLEST, max(trace.most_blocks, _all_blocks(trace)))
    allowed = delivered_tokens + _HITS_NOISE * trace.input_tokens
    if hits_with(trace, model, workers, places, _FULLEST) <= allowed:
        return most
    low, high = trace.most_blocks, most
    for step in range(_STEPS):
        if high - low <= max(1, low // 32):
            break
        middle = (low + high) // 2
        if hits_with(trace, model, workers, places, middle) > allowed:
            high = middle - 1
        else:
            low = middle
        on_step(step)
    return low


def told_memory(requests: Sequence[Traced], block_size: int) -> int:
    """Blocks per worker as the workers said of themselves at the decisions; 0: nobody said."""
    told = {
        candidate.worker.id: candidate.worker.kv_tokens_total
        for one in requests
        for candidate in one.candidates
        if candidate.worker.kv_tokens_total
    }
    return int(median(told.values())) // block_size if told else 0


def hits_with(
    trace: Trace, model: WorkerModel, workers: int, places: Mapping[int, int], blocks: int
) -> int:
    """Cached tokens of the recorded placement with so much memory."""
    return sum(placed(trace, model, workers, places, blocks).cached_tokens)


def placed(
    trace: Trace, model: WorkerModel, workers: int, places: Mapping[int, int], blocks: int
) -> Served:
    """A run in which every request goes where it was recorded."""
    sized = msgspec.structs.replace(model, kv_blocks=blocks)
    return Replay(trace, sized, workers, lambda config, cost: RecordedPlaces(places), 1.0, 1).run()


def _all_blocks(trace: Trace) -> int:
    """Blocks of all prompts and answers together: more is never used."""
    blocks = {block for request in trace.requests for block in (*request.path, *request.answer)}
    running = sum(-(-one.output_tokens // trace.block_size) + 1 for one in trace.requests)
    return len(blocks) + running
