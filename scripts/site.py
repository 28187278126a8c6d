"""Stages the documentation for the site's builder: ``python scripts/site.py build/docs``.

The pages are written to be read in the repository, so some links lead out of docs/. Here those
files come along: Markdown of the top level as pages, all other files as plain text, folders as
lists of their files. Every other link stays as it is, and the builder checks them all.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "README.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Of the top level. The README's place is taken by the first page of docs/."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.DOTALL | re.MULTILINE)


class Stage:
    """One run."""

    def __init__(self, to: Path) -> None:
        self._to = to

    def run(self) -> None:
        """Everything, anew."""
        shutil.rmtree(self._to, ignore_errors=True)
        shutil.copytree(DOCS, self._to)
        for page in sorted(DOCS.rglob("*.md")):
            self._page(page, self._to / page.relative_to(DOCS))
        for name, staged in PAGES.items():
            if name != "README.md":
                self._page(ROOT / name, self._to / staged)

    def _page(self, source: Path, target: Path) -> None:
        parts = _FENCE.split(source.read_text(encoding="utf-8"))
        for index in range(0, len(parts), 2):
            parts[index] = _LINK.sub(lambda m: self._link(m, source, target), parts[index])
        target.write_text("".join(parts), encoding="utf-8")

    def _link(self, found: re.Match[str], source: Path, target: Path) -> str:
        begin, path, anchor, end = found.groups()
        if re.match(r"[a-z]+:", path):
            return found[0]
        meant = (source.parent / path).resolve()
        staged = self._staged(meant)
        kept = "" if anchor is None or meant == ROOT / "README.md" else anchor
        return f"{begin}{os.path.relpath(staged, target.parent)}{kept}{end}"

    def _staged(self, meant: Path) -> Path:
        """Where the site has a file or folder of the repository."""
        if meant.is_relative_to(DOCS):
            place = self._to / meant.relative_to(DOCS)
            return place / "README.md" if meant.is_dir() else place
        name = meant.relative_to(ROOT)
        if str(name) in PAGES:
            return self._to / PAGES[str(name)]
        if meant.is_dir():
            return self._folder(meant)
        copy = self._to / "files" / f"{name}.txt"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(meant, copy)
        return copy

    def _folder(self, folder: Path) -> Path:
        name = folder.relative_to(ROOT)
        page = self._to / "files" / name / "README.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"# {name}", ""]
        for file in sorted(one for one in folder.rglob("*") if one.is_file()):
            shown = os.path.relpath(self._staged(file), page.parent)
            lines.append(f"- [{file.relative_to(folder)}]({shown})")
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return page


if __name__ == "__main__":
    Stage(Path(sys.argv[1]).resolve()).run()
