"""Reading a few samples out of a Prometheus text, whatever else is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_LINES = 100_000
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")


@dataclass(slots=True)
class Samples:
    """Samples by name: (labels, value), in the order of the text."""

    found: dict[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def total(self, *names: str) -> float | None:
        """Sum over all label sets of the first name that is there; None: none of them is."""
        for name in names:
            samples = self.found.get(name)
            if samples:
                return sum(value for _, value in samples)
        return None

    def mean(self, *names: str) -> float | None:
        """As :meth:`total`, for shares."""
        for name in names:
            samples = self.found.get(name)
            if samples:
                return sum(value for _, value in samples) / len(samples)
        return None

    def count(self, *names: str) -> int:
        """As :meth:`total`, as a count >= 0; 0 if none of the names is there."""
        value = self.total(*names)
        return 0 if value is None else max(0, int(value))

    def label(self, name: str, label: str) -> str | None:
        """A label of the first sample of a name."""
        samples = self.found.get(name)
        return samples[0][0].get(label) if samples else None


def read(text: bytes, *prefixes: str) -> Samples:
    """The finite samples whose names begin with one of ``prefixes``; other lines are passed over.

    Histogram buckets are not read: they are most of a text and say nothing that is asked for.
    """
    samples = Samples()
    wanted = tuple(prefix.encode() for prefix in prefixes)
    for line in text.split(b"\n", MAX_LINES)[:MAX_LINES]:
        if not line.startswith(wanted) or b"_bucket{" in line:
            continue
        match = _LINE.match(line.decode("utf-8", "replace"))
        if match is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if value - value == 0.0:
            pairs = dict(_LABEL.findall(labels)) if labels else {}
            samples.found.setdefault(name, []).append((pairs, value))
    return samples
