"""Every case has a test file, and docs/cases.md names all of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {"A": 19, "B": 22, "C": 9, "D": 14, "E": 8, "F": 8}
ROW = re.compile(r"^\| ([A-F]\d\d) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_every_case_is_tested_and_every_test_is_listed() -> None:
    rows = ROW.findall((ROOT / "docs" / "cases.md").read_text())
    expected = [f"{part}{n:02}" for part, last in NUMBERS.items() for n in range(1, last + 1)]
    assert [case for case, _, _ in rows] == expected
    listed = set()
    for case, _, links in rows:
        names = re.findall(r"\[(test_\w+\.py)\]\(\.\./tests/cases/\1\)", links)
        assert names, case
        for name in names:
            assert case.lower() in name.split("_"), (case, name)
            source = (ROOT / "tests" / "cases" / name).read_text()
            assert re.search(r"^(async )?def test_", source, re.MULTILINE), name
            assert case in source.split("\n", 1)[0], f"{name} does not begin with its case"
            listed.add(name)
    there = {path.name for path in (ROOT / "tests" / "cases").glob("test_?[0-9]*.py")}
    assert there == listed
