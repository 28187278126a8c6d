"""What no router can beat, or only by luck: the figures beside which policies are judged."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from gateway.sim.model import WorkerModel, cached_tokens
from gateway.sim.trace import Trace


def infinite_hits(trace: Trace) -> list[int]:
    """Cached tokens per request of one cache that sees all requests and forgets nothing."""
    seen: set[int] = set()
    hits = []
    for request in trace.requests:
        depth = _depth(request.path, seen)
        seen.update(request.path[depth:], request.answer)
        hits.append(cached_tokens(depth, trace.block_size, request.input_tokens))
    return hits


def pooled_hits(trace: Trace, blocks: int) -> list[int]:
    """The same of one cache of ``blocks`` that drops its least recently used leaf."""
    cache: dict[int, None] = {}  # oldest first
    hits = []
    for request in trace.requests:
        depth = _depth(request.path, cache)
        hits.append(cached_tokens(depth, trace.block_size, request.input_tokens))
        for block in chain(reversed(request.answer), reversed(request.path)):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > blocks:
            del cache[next(iter(cache))]
    return hits


def hit_rate(trace: Trace, hits: Sequence[int]) -> float:
    """Share of the prompts' tokens."""
    return sum(hits) / trace.input_tokens


def work_s(trace: Trace, hits: Sequence[int], model: WorkerModel) -> float:
    """Seconds of prefill on one worker that nothing slows down."""
    return sum(
        model.prefill_s(request.input_tokens - hit, request.input_tokens)
        for request, hit in zip(trace.requests, hits, strict=True)
    )


def time_scale(trace: Trace, model: WorkerModel, workers: int, load: float) -> float:
    """Factor on the trace's arrival times by which the workers are busy to the share ``load``.

    Under a perfect router with an infinite cache, and of prefill and decode whichever is busier;
    ``decode_knee`` sequences count as a worker that is full of decodes.
    """
    prefill = work_s(trace, infinite_hits(trace), model)
    decode = trace.output_tokens * model.token_s / model.decode_knee
    return max(prefill, decode) / (load * workers) / trace.span_s


def queue_ttft(
    trace: Trace, hits: Sequence[int], model: WorkerModel, workers: int, scale: float
) -> list[float]:
    """Times to first token with ``hits``, one FIFO queue before all workers and free decodes."""
    free = [0.0] * workers
    ttft = [0.0] * len(trace.requests)
    arrivals = [(r.arrival_s * scale, at) for at, r in enumerate(trace.requests) if r.first]
    heapq.heapify(arrivals)
    while arrivals:
        arrived, at = heapq.heappop(arrivals)
        request = trace.requests[at]
        took = model.prefill_s(request.input_tokens - hits[at], request.input_tokens)
        end = max(arrived, heapq.heappop(free)) + took
        heapq.heappush(free, end)
        ttft[at] = end - arrived
        if request.following is not None:
            think_s = trace.requests[request.following].think_s
            ended = end + request.output_tokens * model.token_s
            heapq.heappush(arrivals, (ended + think_s, request.following))
    return ttft


def _depth(path: Sequence[int], cache: dict[int, None] | set[int]) -> int:
    return next((at for at, block in enumerate(path) if block not in cache), len(path))
