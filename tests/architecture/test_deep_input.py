"""Whoever is ready for input that cannot be parsed is ready for input that is nested too deeply.

Parsers raise ``RecursionError`` for that, which is no ``DecodeError``: it would end a background
task, or show a trace.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {"msgspec.DecodeError", "tomllib.TOMLDecodeError", "json.JSONDecodeError"}


def caught(handler: ast.ExceptHandler) -> set[str]:
    """Names of what it catches."""
    if handler.type is None:
        return set()
    named = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(one) for one in named}


def test_no_handler_of_parse_errors_lets_recursion_errors_through() -> None:
    found, seen = [], 0
    for package in ("gateway", "shared", "worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Try):
                    names = set().union(*map(caught, node.handlers))
                    seen += bool(names & PARSERS)
                    if names & PARSERS and not names & {"RecursionError", "Exception"}:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert seen > 20
    assert found == []
