"""The changelog keeps its form, and knows the version that the packages have."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text()
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def sections() -> dict[str, str]:
    """Text by title, in the order of the file."""
    _, *parts = re.split(r"^## (.+)\n", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def numbers(title: str) -> tuple[int, ...]:
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d{2}-\d{2}", title)
    assert found is not None, f"not 'X.Y.Z - YYYY-MM-DD': {title}"
    return tuple(map(int, found.groups()))


def test_versions_stand_in_order_and_each_kind_once() -> None:
    first, *others = sections()
    released = others if first == "Unreleased" else [first, *others]
    assert all(newer > older for newer, older in pairwise(map(numbers, released)))
    for title, text in sections().items():
        kinds = re.findall(r"^### (.+)$", text, flags=re.MULTILINE)
        assert sorted(set(kinds)) == sorted(kinds), f"{title}: a kind stands there twice"
        assert set(kinds) <= set(KINDS), title


def test_the_packages_version_is_the_newest_or_the_next() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tuple(map(int, project["version"].split(".")))
    released = [numbers(title) for title in sections() if title != "Unreleased"]
    if version not in released:
        assert "Unreleased" in sections()
        assert all(version > older for older in released)
    else:
        assert version == released[0]
