"""Prefix families: prompts that begin alike, and where they part.

A record says what its prompt began with (``family``), how it went on (``path``: one mark after 128,
256, 512, ... tokens) and how much of it was known (``evicted + available``), which is how long it
was like some earlier prompt. Marks give the tree, the lengths say where within a step it branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.report.model import Branch, Family, Number
from gateway.report.query import Query, share

FIRST = 64
"""Tokens of a family; level n of a path is after ``FIRST << n``."""
LEVELS = 16
TREES = 8
"""So many families are drawn."""
WIDTH = 4
"""Largest branches kept of each."""
LEAST_SHARE = 0.01
"""Smaller parts of a family are not followed."""
_MARK = 4
_SEEN = "(t_evicted + t_available)"

Node = tuple[str, str]
"""Family and path."""


@dataclass(slots=True)
class _Counts:
    requests: int
    prompt: int
    delivered: int
    ways: int
    diverges_at: Number
    parent: Node | None
    children: list[Node] = field(default_factory=list)


def families(query: Query, limit: int) -> list[Family]:
    """Those with most prompt tokens; the first of them with their trees."""
    rows = query.rows(f"""
        SELECT family, count(*), sum(t_prompt) AS prompt, sum(t_delivered),
               count(DISTINCT nullif(worker, '')),
               {query.quantile}({_SEEN}, 0.5) FILTER ({_SEEN} > 0)
        FROM finals WHERE family <> '' GROUP BY family
        ORDER BY prompt DESC, family LIMIT {limit}
    """)
    trees = _trees(query, [row[0] for row in rows[:TREES]])
    return [
        Family(
            family=family,
            requests=requests,
            prompt=int(prompt),
            delivered=int(delivered),
            rate=share(delivered, prompt),
            workers=workers,
            diverges_at=diverges,
            tree=trees.get(family, []),
        )
        for family, requests, prompt, delivered, workers, diverges in rows
    ]


def _trees(query: Query, names: Sequence[str]) -> dict[str, list[Branch]]:
    """Level by level; only the largest branches are followed."""
    known: dict[Node, _Counts] = {}
    level: list[Node] = [(name, "") for name in names]
    least: dict[str, int] = {}
    for number in range(LEVELS):
        if not level:
            break
        found = _level(query, level, number)
        for node, counts in found:
            known[node] = counts
            if number == 0:
                least[node[0]] = max(2, int(LEAST_SHARE * counts.requests))
        level = []
        for node, counts in sorted(found, key=lambda item: -item[1].requests):
            siblings = known[counts.parent].children if counts.parent else []
            if counts.requests < least[node[0]] or len(siblings) >= WIDTH:
                continue
            siblings.append(node)
            if len(node[1]) == number * _MARK and counts.ways:
                level.append(node)
    return {name: [_branch((name, ""), 0, known)] for name in names if (name, "") in known}


def _level(query: Query, nodes: Sequence[Node], number: int) -> list[tuple[Node, _Counts]]:
    """The branches below ``nodes`` whose prompts are alike for ``FIRST << number`` tokens."""
    size = number * _MARK
    wanted = [node[0] + node[1] for node in nodes]
    parent = f"family || left(path, {max(0, size - _MARK)})"
    listed = ", ".join(_quoted(name) for name in wanted)
    reach = FIRST << number
    rows = query.rows(f"""
        SELECT family, left(path, {size}) AS node, count(*), sum(t_prompt), sum(t_delivered),
               count(DISTINCT nullif(substr(path, {size + 1}, {_MARK}), '')),
               {query.quantile}({_SEEN}, 0.5)
                   FILTER ({_SEEN} >= {reach} AND {_SEEN} < {2 * reach}
                           AND {_SEEN} < t_prompt - t_tail)
        FROM finals WHERE {parent} IN ({listed}) AND length(path) >= {size}
        GROUP BY family, node HAVING count(*) >= 2
        QUALIFY row_number() OVER (
            PARTITION BY family, left(node, {max(0, size - _MARK)})
            ORDER BY count(*) DESC, node) <= {WIDTH}
    """)
    return [
        (
            (family, node),
            _Counts(
                requests=requests,
                prompt=int(prompt),
                delivered=int(delivered),
                ways=min(ways, requests),
                diverges_at=at,
                parent=(family, node[:-_MARK]) if number else None,
            ),
        )
        for family, node, requests, prompt, delivered, ways, at in rows
    ]


def _branch(node: Node, level: int, known: dict[Node, _Counts]) -> Branch:
    """A branch and those below; a stretch on which nothing parts is one branch."""
    counts = known[node]
    while len(counts.children) == 1:
        only = known[counts.children[0]]
        if only.requests < counts.requests:
            break
        node, level, counts = counts.children[0], level + 1, only
    return Branch(
        tokens=FIRST << level,
        requests=counts.requests,
        prompt=counts.prompt,
        delivered=counts.delivered,
        rate=share(counts.delivered, counts.prompt),
        ways=counts.ways,
        diverges_at=counts.diverges_at,
        branches=[_branch(child, level + 1, known) for child in counts.children],
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
