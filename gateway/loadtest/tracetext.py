"""A trace's requests as text of the right shape: equal blocks become equal words. Pure."""

from __future__ import annotations

from random import Random

from gateway.loadtest.workloads import Session, Turn, text
from gateway.sim.trace import Trace, TraceRequest

TOKENS_PER_WORD = 2.5
"""Of the made-up words; how many tokens they really are depends on the tokenizer."""


def sessions_of(trace: Trace, seed: int, mark: str, speed: float) -> list[Session]:
    """The requests at their own times; those of a session wait for the answers before them.

    :param speed: 2 = twice as fast.
    """
    words = max(1, round(trace.block_size / TOKENS_PER_WORD))

    def turn(request: TraceRequest) -> Turn:
        blocks = [text(Random(f"{seed}/{block}"), words) for block in request.path]
        rest = request.input_tokens - len(request.path) * trace.block_size
        tail = text(Random(f"{seed}/{request.arrival_s}"), round(rest / TOKENS_PER_WORD) + 1)
        prompt = " ".join([mark, *blocks, tail])
        return Turn((), request.output_tokens, prompt, request.think_s / speed)

    made = []
    begun = trace.requests[0].arrival_s
    for request in trace.requests:
        if not request.first:
            continue
        turns, one = [turn(request)], request
        while one.following is not None:
            one = trace.requests[one.following]
            turns.append(turn(one))
        made.append(Session(tuple(turns), (request.arrival_s - begun) / speed))
    return made
