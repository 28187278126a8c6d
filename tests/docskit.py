"""The documentation as its readers use it: links, anchors, and the commands in it.

A block of shell commands is a fence of language ``sh``. What stands above it says who runs it:

    <!-- run: up -->              tests, in a folder with examples, beside a running cluster
    <!-- run: slow up -->         the same in ``make test-docs``
    <!-- run: slow alone -->      there as well, without a cluster
    <!-- run by: tests/x.py -->   that test takes the page's text
    <!-- not run: REASON -->      nobody, and why

Blocks without a language are no commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = (
    *("headwater", "make", "curl", "docker", "kubectl", "pip", "pipx", "uv", "python", "git"),
    *("bench/", "scripts/", "export", "helm", "llama-server", "vllm", "openssl", "redis-cli"),
)
_MARK = re.compile(r"^<!-- (run|run by|not run): (.+?) -->$")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """All Markdown of the repository that is for readers."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]


@dataclass(frozen=True)
class Block:
    """One fence."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    """``run``, ``run by``, ``not run`` or nothing."""
    told: str
    """What the mark says."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Logical lines without comments: continued lines and open quotes are one."""
        found: list[str] = []
        open_ = ""
        for line in self.text.splitlines():
            open_ = f"{open_}\n{line}" if open_ else line
            if open_.rstrip().endswith("\\") or _unclosed(open_):
                continue
            if open_.strip() and not open_.strip().startswith("#"):
                found.append(open_.strip())
            open_ = ""
        assert not open_, f"{self.name}: a quote is not closed"
        return found


def _unclosed(text: str) -> bool:
    bare = re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE)
    return bare.count("'") % 2 == 1


@cache
def parsed(page: Path) -> tuple[Token, ...]:
    """A page's tokens."""
    return tuple(MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")))


@cache
def blocks() -> tuple[Block, ...]:
    """All fences."""
    found: list[Block] = []
    for page in pages():
        lines = page.read_text(encoding="utf-8").splitlines()
        for token in parsed(page):
            if token.type != "fence" or token.map is None:
                continue
            first = token.map[0]
            above = next((one for one in reversed(lines[:first]) if one.strip()), "")
            mark = _MARK.match(above.strip())
            what, told = (mark[1], mark[2]) if mark else ("", "")
            found.append(Block(page, first + 1, token.info.strip(), token.content, what, told))
    return tuple(found)


def marked(told: str) -> list[Block]:
    """Blocks that are run in one way."""
    return [one for one in blocks() if one.mark == "run" and one.told == told]


def inline() -> Iterator[tuple[str, str]]:
    """(where, text) of code in running text and tables, and of commands that no test runs."""
    for page in pages():
        if page.name == "CHANGELOG.md":  # speaks of other times
            continue
        for token in parsed(page):
            for child in token.children or ():
                if child.type == "code_inline":
                    at = token.map[0] + 1 if token.map else 0
                    yield f"{page.relative_to(ROOT)}:{at}", child.content
    for block in blocks():
        if block.mark != "run":
            for command in block.commands() if block.language == "sh" else ():
                yield block.name, command


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and Python-Markdown agree on it."""
    text = re.sub(r"`|\*", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
    return re.sub(r"\s", "-", re.sub(r"[^\w\- ]", "", text.strip().lower()))


@cache
def anchors(page: Path) -> frozenset[str]:
    """All of a page."""
    heads: list[str] = []
    for token, inside in pairwise(parsed(page)):
        if token.type == "heading_open":
            heads.append(slug(inside.content))
    return frozenset(heads)


def links() -> Iterator[tuple[Path, str]]:
    """(page, target) of all links and pictures; not those in code."""
    for page in pages():
        for token in parsed(page):
            for child in token.children or ():
                target = child.attrs.get("href") or child.attrs.get("src")
                if target:
                    yield page, str(target)
