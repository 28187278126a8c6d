"""Rows of ``bench/engine.py``: a figure beside what was asked of it, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from worker.drive import NO_TIME, Meter, Spent

Status = Literal["goal", "met", "missed", "not measured", "shown"]
FILE_WIDTH = 170
_COLOURS = {"goal": "green", "met": "green", "missed": "red", "not measured": "yellow", "shown": ""}


@dataclass
class Row:
    """One line of the report. ``value`` None: not measured, and ``note`` says why."""

    case: str
    figure: str
    value: float | None
    must: float | None = None
    goal: float | None = None
    unit: str = "x"
    less_is_better: bool = False
    by_wall: float | None = None
    """The same figure by wall clock, where ``value`` is by CPU seconds."""
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """How the figure stands to what was asked."""
        if self.value is None:
            return "not measured"
        if self.must is None:
            return "shown"
        if self.goal is not None and self._reaches(self.goal):
            return "goal"
        return "met" if self._reaches(self.must) else "missed"

    @property
    def value_text(self) -> str:
        """The value with its unit."""
        return _number(self.value, self.unit)

    def _reaches(self, bound: float) -> bool:
        assert self.value is not None
        return self.value <= bound if self.less_is_better else self.value >= bound

    def as_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return asdict(self) | {"status": self.status}


@dataclass
class Contest:
    """Contestants that take turns; the best round of each counts."""

    rounds: dict[str, list[Spent]]

    @classmethod
    def run(cls, rounds: int, contestants: Mapping[str, Callable[[], Spent]]) -> Contest:
        """``rounds`` rounds; in each, one contestant after the other."""
        seen: dict[str, list[Spent]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, turn in contestants.items():
                seen[name].append(turn())
        return cls(seen)

    def best(self, name: str, meter: Meter) -> float:
        """Seconds of a contestant's best round."""
        return min(spent.by(meter) for spent in self.rounds[name])

    def ratio(self, ours: str, peer: str, meter: Meter) -> float:
        """How many times faster ours is."""
        return self.best(peer, meter) / self.best(ours, meter)

    def detail(self, tokens: int | None = None) -> dict[str, Any]:
        """Best seconds of each contestant, and tokens a second if ``tokens`` were made."""
        out: dict[str, Any] = {}
        for name in self.rounds:
            wall, cpu = (round(self.best(name, meter), 4) for meter in ("wall", "cpu"))
            out[name] = {"wall_s": wall, "cpu_s": cpu}
            if tokens is not None:
                out[name]["tokens_per_cpu_s"] = round(tokens / cpu, 1)
        return out


def total(parts: Sequence[Spent]) -> Spent:
    """The sum."""
    return sum(parts, NO_TIME)


def show(rows: Sequence[Row], about: Mapping[str, Any], style: str) -> None:
    """Print everything on stdout."""
    if style == "json":
        print(json.dumps({"about": dict(about), "rows": [row.as_json() for row in rows]}))
        return
    table = Table(title="Headwater's worker against its peers", title_justify="left")
    for name in ("", "figure", "value", "by wall", "must", "goal", "verdict", "note"):
        right = name in ("value", "by wall", "must", "goal")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        bound = "<= " if row.less_is_better else ">= "
        table.add_row(
            row.case,
            row.figure,
            row.value_text,
            _number(row.by_wall, row.unit),
            "" if row.must is None else bound + _number(row.must, row.unit),
            "" if row.goal is None else bound + _number(row.goal, row.unit),
            f"[{_COLOURS[row.status]}]{row.status}" if _COLOURS[row.status] else row.status,
            row.note,
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(table)
    console.print("  ".join(f"{name}: {value}" for name, value in about.items()))


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{unit if unit in ('x', '%') else ' ' + unit if unit else ''}"
