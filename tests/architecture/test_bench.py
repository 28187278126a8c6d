"""Every measurement runs with ``python -P``, which does not look for modules beside the script."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_INSTALLED = {"bench"} | {
    path.stem for folder in ("bench", "tests") for path in (ROOT / folder).glob("*.py")
}
SCRIPTS = [path for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()]


def imported(statement: ast.stmt) -> set[str]:
    """Top-level names of the modules that a statement imports."""
    match statement:
        case ast.Import(names=names):
            return {name.name.split(".")[0] for name in names}
        case ast.ImportFrom(module=str(module), level=0):
            return {module.split(".")[0]}
    return set()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_where_what_it_imports_lies(script: Path) -> None:
    for statement in ast.parse(script.read_text()).body:
        if "sys.path" in ast.unparse(statement) and not isinstance(statement, ast.FunctionDef):
            return
        assert not imported(statement) & NOT_INSTALLED, f"line {statement.lineno}"


def test_there_are_scripts_that_need_it() -> None:
    assert {"replay", "routing", "storm"} <= {path.stem for path in SCRIPTS}
