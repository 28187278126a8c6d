"""Request traces as values: who asks when, and which blocks of the prompts are equal.

One JSON object a line, in the order of time: ``timestamp`` (ms), ``input_length``,
``output_length``, ``hash_ids`` (one id per block of the prompt, the last one possibly partial) and
perhaps ``session_id`` and ``took`` (ms from the arrival to the end of the answer). Equal ids mean
equal tokens; ids are chained here, so it does not matter whether they also stand for what comes
before.

With session ids the replay is closed-loop: a session's next request comes when the one before has
been answered and its think time is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import msgspec

from shared.errors import HeadwaterError

TRACE_TOKEN_S = 0.02
"""What the makers of traces assume that a token of an answer takes; the rest of a gap between two
turns is think time."""


class TraceError(HeadwaterError):
    """This is no trace; the message is one line and names the line at fault."""


class Row(msgspec.Struct, frozen=True):
    """A line as it stands in the file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int | str | None = None
    took: float | None = None
    """ms until the whole answer was there; None: assumed from its length."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; blocks are numbered over the whole trace, equal prefixes have equal numbers."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    path: tuple[int, ...]
    """The prompt's full blocks."""
    answer: tuple[int, ...] = ()
    """The full blocks that the answer adds, known from the session's next prompt."""
    think_s: float = 0.0
    """From the end of the session's answer before to this request."""
    first: bool = True
    """Comes at ``arrival_s``, not after another one."""
    following: int | None = None
    """The session's next request."""
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; at least one."""

    requests: tuple[TraceRequest, ...]
    block_size: int
    """Tokens."""
    sessions: int | None
    """None: the trace names none, and every request comes at its own time (open loop)."""

    @property
    def input_tokens(self) -> int:
        """Of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Of all answers."""
        return sum(request.output_tokens for request in self.requests)

    @property
    def span_s(self) -> float:
        """Between the first and the last arrival that does not wait for an answer."""
        starts = [request.arrival_s for request in self.requests if request.first]
        return max(1e-9, starts[-1] - starts[0])

    @property
    def most_blocks(self) -> int:
        """Blocks that the largest request needs while it runs."""
        return max(
            -(-(request.input_tokens + request.output_tokens) // self.block_size)
            for request in self.requests
        )


def read_trace(lines: Iterable[bytes], block_size: int, limit: int = 0) -> Trace:
    """A trace from its lines; ``limit``: only so many requests, 0 = all.

    :raises TraceError: a line is none of a trace, or there is no line at all.
    """
    rows: list[Row] = []
    decoder = msgspec.json.Decoder(Row)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise TraceError(f"line {number} is no request of a trace: {error}") from error
        fault = _fault(row, rows[-1] if rows else row, block_size)
        if fault:
            raise TraceError(f"line {number}: {fault}")
        rows.append(row)
        if len(rows) == limit:
            break
    if not rows:
        raise TraceError("there is no request in it")
    return chain(rows, block_size)


def _fault(row: Row, before: Row, block_size: int) -> str:
    if row.input_length < 0 or row.output_length < 0:
        return "a length below 0"
    if not before.timestamp <= row.timestamp < float("inf"):
        return "its timestamp lies before that of the line above"
    if (row.session_id is None) != (before.session_id is None):
        return "some requests have a session_id and some have none"
    full, given = row.input_length // block_size, len(row.hash_ids)
    if not full <= given <= full + 1:
        return (
            f"{given} hash_ids for {row.input_length} tokens do not fit blocks of {block_size} "
            "tokens (--block-size)"
        )
    return ""


def chain(rows: Sequence[Row], block_size: int) -> Trace:
    """A trace from one or more rows in the order of time."""
    numbers: dict[tuple[int, int], int] = {}
    requests = []
    for row, arrival_s in zip(rows, spread([row.timestamp / 1000 for row in rows]), strict=True):
        block, path = -1, []
        for name in row.hash_ids[: row.input_length // block_size]:
            block = numbers.setdefault((block, name), len(numbers))
            path.append(block)
        requests.append(
            TraceRequest(
                arrival_s,
                max(1, row.input_length),
                max(1, row.output_length),
                tuple(path),
                session="" if row.session_id is None else str(row.session_id),
            )
        )
    if rows[0].session_id is None:
        return Trace(tuple(requests), block_size, None)
    turns: dict[int | str | None, list[int]] = {}
    for at, row in enumerate(rows):
        turns.setdefault(row.session_id, []).append(at)
    for session in turns.values():
        for before, after in pairwise(session):
            took = rows[before].took
            _follow(requests, before, after, block_size, None if took is None else took / 1000)
    return Trace(tuple(requests), block_size, len(turns))


def _follow(
    requests: list[TraceRequest], before: int, after: int, block_size: int, took_s: float | None
) -> None:
    """Make one request wait for another's answer, whose blocks its prompt tells."""
    one, two = requests[before], requests[after]
    if took_s is None:
        took_s = TRACE_TOKEN_S * one.output_tokens
    gap = two.arrival_s - one.arrival_s - took_s
    known, answer = len(one.path), one.answer
    if two.path[:known] == one.path:
        ends = (one.input_tokens + one.output_tokens) // block_size
        answer = two.path[known : max(known, ends)]
    requests[before] = replace(one, answer=answer, following=after)
    requests[after] = replace(two, think_s=max(0.0, gap), first=False)


def spread(times: Sequence[float]) -> list[float]:
    """Requests of one tick, evenly over the time to the next tick; the last as over the gap before.

    Some traces have ticks of seconds, which would make bursts that nobody sent.
    """
    ticks = [(at, sum(1 for _ in same)) for at, same in groupby(times)]
    gaps = [after - at for (at, _), (after, _) in pairwise(ticks)]
    gaps.append(gaps[-1] if gaps else 0.0)
    return [
        at + gap * place / count
        for (at, count), gap in zip(ticks, gaps, strict=True)
        for place in range(count)
    ]
