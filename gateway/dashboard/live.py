"""Sums of what has happened lately, ready to be shown at any moment. A record sink; pure.

Requests are counted into steps of ten seconds by when they ended; fifteen minutes are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add
from statistics import median
from typing import Any

from msgspec.structs import astuple

from gateway.records import Outcome, RequestRecord, TokenFlow

TERMS = TokenFlow.__struct_fields__
STEP_S = 10.0
STEPS = 90
TIMES_KEPT = 64
"""Times to first token kept of each step and kind: enough for a median."""
FAMILIES_KEPT = 512
FAMILIES_SHOWN = 12


@dataclass(slots=True)
class Step:
    """What ended within one step."""

    number: int
    requests: int = 0
    sums: list[int] = field(default_factory=lambda: [0] * len(TERMS))
    hit_s: list[float] = field(default_factory=list)
    none_s: list[float] = field(default_factory=list)

    def add(self, record: RequestRecord) -> None:
        """Count one final attempt."""
        self.requests += 1
        flow = record.flow
        if not flow.prompt:
            return
        self.sums = list(map(add, self.sums, astuple(flow)))
        if record.ttft_s is not None and record.reported:
            times = self.hit_s if flow.delivered else self.none_s
            if len(times) < TIMES_KEPT:
                times.append(record.ttft_s)
            else:
                times[self.requests % TIMES_KEPT] = record.ttft_s


@dataclass(slots=True)
class _Family:
    requests: int = 0
    prompt: int = 0
    delivered: int = 0


class Live:
    """Takes every record; ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._gone = Step(-1)
        self._families: dict[str, _Family] = {}
        self._reasons: dict[str, int] = {}
        self._outcomes: dict[str, int] = dict.fromkeys((one.value for one in Outcome), 0)

    def record(self, record: RequestRecord) -> None:
        """See ``gateway.telemetry.RecordSink``."""
        if not record.final:
            return
        self._outcomes[record.outcome] += 1
        if record.why is not None:
            self._reasons[record.why.code] = self._reasons.get(record.why.code, 0) + 1
        self._step().add(record)
        if record.family and record.flow.prompt:
            family = self._family(record.family)
            family.requests += 1
            family.prompt += record.flow.prompt
            family.delivered += record.flow.delivered

    def _step(self) -> Step:
        number = int((self._clock() - self._begun) / STEP_S)
        steps = self._steps
        if not steps or steps[-1].number != number:
            if len(steps) == STEPS:
                self._retire(steps[0])
            steps.append(Step(number))
        return steps[-1]

    def _retire(self, step: Step) -> None:
        self._gone.requests += step.requests
        self._gone.sums = [a + b for a, b in zip(self._gone.sums, step.sums, strict=True)]

    def _family(self, name: str) -> _Family:
        """Its counts. Where there are too many families, half of them, the smallest, go."""
        family = self._families.get(name)
        if family is None:
            if len(self._families) >= FAMILIES_KEPT:
                largest = sorted(self._families.items(), key=lambda item: -item[1].prompt)
                self._families = dict(largest[: FAMILIES_KEPT // 2])
            family = self._families[name] = _Family()
        return family

    def shown(self) -> dict[str, Any]:
        """Everything, in JSON terms; names as in the report."""
        number = int((self._clock() - self._begun) / STEP_S)
        first = max(0, number - STEPS + 1)
        steps = [step for step in self._steps if step.number >= first]
        return {
            "totals": _totals([self._gone, *self._steps]),
            "window": {
                "seconds": min(STEPS * STEP_S, self._clock() - self._begun),
                "totals": _totals(steps),
                "ttft_hit_s": _median([time for step in steps for time in step.hit_s]),
                "ttft_none_s": _median([time for step in steps for time in step.none_s]),
            },
            "series": _series(steps, first, number),
            "families": self._largest(),
            "reasons": self._reasons,
            "outcomes": {name: count for name, count in self._outcomes.items() if count},
        }

    def _largest(self) -> list[dict[str, Any]]:
        largest = sorted(self._families.items(), key=lambda item: -item[1].prompt)
        return [
            {
                "family": name,
                "requests": family.requests,
                "prompt": family.prompt,
                "delivered": family.delivered,
            }
            for name, family in largest[:FAMILIES_SHOWN]
        ]


def _totals(steps: Sequence[Step]) -> dict[str, int]:
    sums = [sum(column) for column in zip(*(step.sums for step in steps), strict=True)]
    if not sums:
        sums = [0] * len(TERMS)
    return {
        "requests": sum(step.requests for step in steps),
        **dict(zip(TERMS, sums, strict=True)),
    }


def _series(steps: Sequence[Step], first: int, last: int) -> dict[str, Any]:
    """Columns, one value per step; steps without requests are there too."""
    known = {step.number: step for step in steps}
    every = [known.get(number) or Step(number) for number in range(first, last + 1)]
    terms = {name: [step.sums[at] for step in every] for at, name in enumerate(TERMS)}
    return {
        "step_s": STEP_S,
        "requests": [step.requests for step in every],
        **{name: column for name, column in terms.items() if any(column)},
        "ttft_hit_s": [_median(step.hit_s) for step in every],
        "ttft_none_s": [_median(step.none_s) for step in every],
    }


def _median(times: Sequence[float]) -> float | None:
    return round(median(times), 5) if times else None
