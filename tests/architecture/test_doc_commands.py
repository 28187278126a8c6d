"""Every command in the documentation is run by a test, or says why not; links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from docskit import PROGRAMS, ROOT, anchors, blocks, inline, links, slug

from shared.cli import build, installed

RUNS = {"up", "slow up", "slow alone"}
REASONS = (
    "needs a GPU", "needs Docker", "needs a Kubernetes cluster", "needs a Redis with",
    "needs trained adapters", "needs llama.cpp", "needs SGLang", "needs vLLM",
    "needs Text Generation Inference", "installs ", "it installs ", "the test suites themselves",
    "a form to fill in",
)  # fmt: skip


def test_blocks_of_commands_say_who_runs_them() -> None:
    for block in blocks():
        if block.language in ("bash", "shell", "console"):
            pytest.fail(f"{block.name}: its language is to be sh")
        if block.language != "sh":
            assert not block.mark, f"{block.name}: marked, but no block of commands"
            continue
        assert block.mark, f"{block.name}: who runs this? See tests/docskit.py"
        if block.mark == "run":
            assert block.told in RUNS, f"{block.name}: {block.told}"
        elif block.mark == "run by":
            text = (ROOT / block.told).read_text()
            assert block.page.name in text, f"{block.told} does not read {block.page.name}"
        else:
            assert block.told.startswith(REASONS), f"{block.name}: {block.told}"
            for test in re.findall(r"tests/\S+\.py", block.told):
                assert (ROOT / test).exists(), f"{block.name}: {test}"


def test_no_command_hides_in_another_block() -> None:
    """The reference of commands shows the examples of the help pages, which are checked below."""
    for block in blocks():
        if block.language or block.page.name == "cli.md":
            continue
        for line in block.text.splitlines():
            assert not line.startswith(tuple(f"{name} " for name in PROGRAMS)), (
                f"{block.name}: {line}"
            )


@cache
def tree() -> Any:
    return typer.main.get_command(build(installed()))


def faults(line: str) -> str | None:
    """What is wrong with a ``headwater`` command line; None: nothing. Runs nothing."""
    words = shlex.split(line, comments=True)
    if "|" in words:
        words = words[words.index("|") + 1 :]
    while words and "=" in words[0]:
        words.pop(0)
    assert words.pop(0) == "headwater"
    command, name = tree(), "headwater"
    while words and hasattr(command, "commands"):
        if words[0] in ("--version", "--help", "COMMAND"):
            return None
        if words[0] not in command.commands:
            return f"{name} has no command {words[0]}"
        name = words.pop(0)
        command = command.commands[name]
    known = {opt: one for one in command.params for opt in (*one.opts, *one.secondary_opts)}
    while words:
        word, _, value = words.pop(0).partition("=")
        if not word.startswith("-") or word in ("-", "--help"):
            continue
        if word not in known:
            return f"{name} has no option {word}"
        if not known[word].is_flag and not value:
            if not words:
                return f"{word} has no value"
            words.pop(0)
    return None


def test_all_headwater_commands_could_be_given() -> None:
    seen = 0
    for where, text in inline():
        for line in text.splitlines():
            found = re.match(r"(?:[A-Z_]+=\S+ )*headwater [a-z-]", line)
            if found and "&&" not in line:
                seen += 1
                assert faults(line.replace("...", "")) is None, f"{where}: {faults(line)}"
    for block in blocks():
        if block.page.name == "cli.md":
            for line in block.commands() if not block.language else ():
                seen += 1
                assert faults(line) is None, f"{block.name}: {faults(line)}"
    assert seen > 60


def test_a_wrong_command_would_be_noticed() -> None:
    assert faults("headwater simulate T --workers 2 --kv-blocks 3 --policy cost") is None
    assert faults("headwater simulatr T")
    assert faults("headwater index stat")
    assert faults("headwater report --sinc 1h")
    assert faults("headwater report --since")


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [*inline(), *((one.name, line) for one in blocks() for line in one.text.splitlines())]
    named = 0
    for where, text in texts:
        found = re.match(r"make ([a-z-]+)", text)
        if found:
            named += 1
            assert found[1] in targets, f"{where}: {text}"
    assert named > 10


def test_links_lead_somewhere() -> None:
    count = 0
    for page, target in links():
        if re.match(r"[a-z]+:", target):
            continue
        count += 1
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{page.relative_to(ROOT)} links to {target}"
        if anchor and to.suffix == ".md":
            assert anchor in anchors(to), f"{page.relative_to(ROOT)}: {target}"
    assert count > 200


def test_no_page_is_lost() -> None:
    """Every page is linked from another one."""
    linked = {(page.parent / target.partition("#")[0]).resolve() for page, target in links()}
    for page in ROOT.glob("docs/**/*.md"):
        assert page in linked or page == ROOT / "docs" / "README.md", page.name


def test_every_page_is_in_the_sites_navigation() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]

    def entries(node: Any) -> Iterator[str]:
        for value in node.values() if isinstance(node, dict) else node:
            if isinstance(value, str):
                yield value
            else:
                yield from entries(value)

    listed = list(entries(site["nav"]))
    assert len(listed) == len(set(listed))
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    decisions = {page for page in pages if page.startswith("adr/0")}
    assert set(listed) - {"changelog.md", "contributing.md"} == pages - decisions


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("What it gives", "what-it-gives"),
        ("`headwater lint`: why prompts", "headwater-lint-why-prompts"),
        ("[a](b.md) link_ed", "a-link_ed"),
    ],
)
def test_anchors(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def test_lists_are_lists_for_every_reader_of_markdown() -> None:
    """Not all begin a list (or a table) right below a line of text, as GitHub does."""
    for page in ROOT.glob("docs/**/*.md"):
        inside, before = False, ""
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.startswith("```"):
                inside = not inside
            begins = re.match(r"(- |1\. |\|)", line) and not inside
            if begins and before.strip() and not re.match(r"\s|#|- |\d+\. |\||<!--", before):
                paragraph = Path(page).read_text().splitlines()[: number - 1]
                top = next((i for i in reversed(range(number - 1)) if not paragraph[i].strip()), -1)
                first = paragraph[top + 1]
                assert re.match(r"- |\d+\. ", first), f"{page.name}:{number}: a blank line before"
            before = line
