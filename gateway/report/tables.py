"""How values and tables look on a terminal, and on anything that is none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.report.model import Number

WIDTH = 100
_GAP = 2
_LEAST_NAME = 8
_DIGITS = re.compile(r"(\d+)")
_LARGE = ((6, "M"), (9, "G"), (12, "T"))


class Page:
    """Collects text of at most ``width`` columns; colours and rules only where asked for."""

    def __init__(self, *, width: int = WIDTH, colour: bool = False) -> None:
        self._out = StringIO()
        self._colour = colour
        self._console = Console(
            file=self._out,
            width=width,
            force_terminal=colour,
            color_system="standard" if colour else None,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def line(self, text: str = "", style: str = "") -> None:
        """One line, wrapped if it is too long."""
        self._console.print(Text(printable(text), style=style))

    def heading(self, text: str) -> None:
        """A blank line and a title."""
        self.line()
        self.line(text, "bold")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1
    ) -> None:
        """A table whose first ``names`` columns are text; the others are numbers, never cut.

        Text loses its middle: hosts differ at one end, ports at the other.
        """
        cells = [[printable(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) + _GAP for column in zip(columns, *cells, strict=True)]
        limit = _fitting(widths[:names], self._console.width - sum(widths[names:])) - _GAP
        table = Table(
            box=box.SIMPLE_HEAD if self._colour else None,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
        )
        for index, column in enumerate(columns):
            if index < names:
                table.add_column(column, no_wrap=True)
            else:
                table.add_column(column, justify="right", no_wrap=True)
        for row in cells:
            names_shown = [without_middle(cell, limit) for cell in row[:names]]
            table.add_row(*map(Text, [*names_shown, *row[names:]]))
        self._console.print(table)

    def text(self) -> str:
        """All of it, without blanks at line ends."""
        return "\n".join(line.rstrip() for line in self._out.getvalue().splitlines()) + "\n"


def _fitting(widths: Sequence[int], room: int) -> int:
    """The largest limit on each width that brings their sum into ``room``, within reason."""
    limit = max(widths)
    while limit > _LEAST_NAME + _GAP and sum(min(width, limit) for width in widths) > room:
        limit -= 1
    return limit


def without_middle(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def told_apart(names: Sequence[str], limit: int) -> list[str]:
    """The names in at most some ``limit`` characters: what all have in common goes first."""
    if len(names) < 2 or max(map(len, names)) <= limit:
        return [without_middle(name, limit) for name in names]
    head = _alike(names)
    tail = _alike([name[head:][::-1] for name in names])
    shown = []
    for name in names:
        own = name[head : len(name) - tail]
        room = max(0, limit - len(own) - 2)
        before = name[:head][-(room // 2) :] if room > 1 else ""
        after = name[len(name) - tail :][: room - len(before)]
        left = "…" if len(before) < head else ""
        right = "…" if len(after) < tail else ""
        shown.append(f"{left}{before}{without_middle(own, limit)}{after}{right}")
    return shown


def _alike(names: Sequence[str]) -> int:
    """How many characters all names begin with."""
    return next(
        (at for at, chars in enumerate(zip(*names, strict=False)) if len(set(chars)) > 1),
        min(map(len, names)),
    )


def printable(text: str) -> str:
    """Text without control characters: names come from clients and must not drive a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def per_hundred(part: int, whole: int) -> str:
    """``part`` of every 100 of ``whole``; never rounded to nothing or to all."""
    if not whole:
        return "-"
    value = 100 * part / whole
    if part and value < 0.05:
        return "<0.1"
    if part < whole and value >= 99.95:
        return ">99.9"
    return f"{value:.1f}"


def counted(count: int, noun: str) -> str:
    """``1 request``, ``2,000 requests``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def amount(count: int) -> str:
    """A number of tokens in at most nine characters."""
    if count < 10_000_000:
        return f"{count:,}"
    power, letter = max((p, c) for p, c in _LARGE if count >= 10**p)
    return f"{count / 10**power:,.1f} {letter}"


def round_number(count: int) -> str:
    """A number of tokens with three figures: 912, 22.3 k, 5.58 M."""
    for power, letter in (*reversed(_LARGE), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {letter}"
    return f"{count:,}"


def percent(value: Number) -> str:
    """A share of 1 in per cent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def seconds(value: Number) -> str:
    """A duration with three figures."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.3g} ms" if value < 0.1 else f"{1000 * value:.0f} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def moment(at: Number) -> str:
    """A time in UTC."""
    return "?" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``w2`` before ``w10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


def ratio(value: Number) -> str:
    """A plain number with two decimals."""
    return "-" if value is None else f"{value:.2f}"
