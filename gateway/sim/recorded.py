"""A gateway's own trace files as a trace: the requests that were answered, in order of arrival.

Sessions are those that clients named; a request without one comes at its own time. Unlike in
traces of others, the end of each answer is known, and so is the time that a session then took.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.records import Outcome
from gateway.sim.trace import Row, Trace, TraceError, chain
from gateway.tracefile import Traced
from shared.blocks import GRANULE

_SERVED = frozenset({Outcome.OK, Outcome.CLIENT_GONE})


def recorded_trace(
    requests: Iterable[Traced], block_size: int, limit: int = 0, model: str = ""
) -> Trace:
    """The requests of one model.

    :param block_size: of the simulated workers, a multiple of 16 tokens.
    :param limit: only the first so many, 0 = all.
    :param model: needed if there is more than one.
    :raises TraceError: there is nothing to simulate, or it is not clear what.
    """
    return trace_of(answered(requests, limit, model), block_size)


def trace_of(served: Sequence[Traced], block_size: int) -> Trace:
    """What :func:`answered` gave, as a trace: one request each, in its order."""
    if block_size % GRANULE:
        raise TraceError(f"has a key per {GRANULE} tokens, so --block-size must be a multiple")
    rows = [_row(one, block_size, at) for at, one in enumerate(served)]
    return chain(rows, block_size)


def answered(requests: Iterable[Traced], limit: int = 0, model: str = "") -> list[Traced]:
    """The answered requests of one model in order of arrival; arguments as above."""
    served = [one for one in requests if one.outcome in _SERVED and one.output_tokens > 0]
    models = sorted({one.model for one in served})
    if model:
        served = [one for one in served if one.model == model]
    elif len(models) > 1:
        raise TraceError(f"has requests for {', '.join(models)}: choose one with --model")
    if not served:
        names = f"; it has {', '.join(models)}" if models else ""
        raise TraceError(
            f"there is no answered request{f' for {model}' if model else ''} in it{names}"
        )
    served.sort(key=lambda one: one.at)
    return served[: limit or None]


def _row(one: Traced, block_size: int, at: int) -> Row:
    stride = block_size // GRANULE
    # Blocks of text are about as long as a granule, but only about.
    tokens = max(one.prompt_tokens, len(one.keys) * GRANULE + 1)
    return Row(
        timestamp=one.at * 1000,
        input_length=tokens,
        output_length=one.output_tokens,
        hash_ids=list(one.keys[stride - 1 :: stride]),
        session_id=one.session or at,
        took=one.took_s * 1000,
    )
