"""Writes ``docs/metrics.md``: ``python -m shared.metricsdoc FILE TITLE=module:function ...``.

Each function gives the metric families of one kind of process, without values. This module knows
no process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

INTRO = """\
# Metrics

Generated from the code by `make docs`; do not edit.

A gateway shows its own at `/metrics` of the admin listener, a worker at `/metrics` of its public
one, both with the usual `process_*` beside them. Names and labels are a contract. All series are
bounded: names that nobody serves share one value, and a worker's series go when it leaves. With
`--processes N` counters are sums over all processes, those that died included. Counters are named
as they are scraped; of a histogram there are `_bucket`, `_sum` and `_count`. Alert rules, a
dashboard and what to do when one rings: [operations.md](operations.md).

<!-- run: up -->
```sh
curl -sf http://127.0.0.1:8001/metrics | grep -c '^headwater_'
curl -sf http://127.0.0.1:8100/metrics | grep '^headwater_engine_kv_blocks'
```
"""

ENDINGS = {"counter": "_total"}


def labels_of(family: Metric) -> list[str]:
    """Label names, whether or not there is a series yet; ``le`` is every histogram's."""
    named: Sequence[str] = getattr(family, "_labelnames", ())
    seen = (name for sample in family.samples for name in sample.labels)
    return [name for name in dict.fromkeys((*named, *seen)) if name != "le"]


def chapter(title: str, families: Iterable[Metric], values: dict[str, str]) -> str:
    """One table. ``values``: of labels from fixed sets, by ``label`` or ``metric.label``."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda one: one.name):
        if not family.name.startswith("headwater_"):
            continue
        name = family.name + ENDINGS.get(family.type, "")
        bare = name.removeprefix("headwater_")
        shown = []
        for label in labels_of(family):
            known = values.get(f"{bare}.{label}", values.get(label, ""))
            shown.append(f"`{label}`: {known}" if known else f"`{label}`")
        rows.append(f"| `{name}` | {family.type} | {'; '.join(shown)} | {family.documentation} |")
    return "\n".join([f"## {title}", "", *rows, ""])


def page(sources: Iterable[tuple[str, str]]) -> str:
    """The whole page; ``sources``: (title, ``module:function``)."""
    parts = [INTRO]
    for title, place in sources:
        module, _, name = place.partition(":")
        made: tuple[Iterable[Metric], dict[str, str]] = _load(module, name)()
        parts.append(chapter(title, *made))
    return "\n".join(parts)


def _load(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def main(arguments: Sequence[str]) -> None:
    """``FILE TITLE=module:function ...``"""
    file, *sources = arguments
    pairs = [(title, place) for title, _, place in (one.partition("=") for one in sources)]
    Path(file).write_text(page(pairs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
