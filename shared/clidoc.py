"""Writes ``docs/cli.md`` from the command tree: ``python -m shared.clidoc docs/cli.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from shared.cli import build, installed

INTRO = """\
# Command line

Generated from the code by `make docs`; do not edit.

`headwater COMMAND --help` shows the same; `headwater --version` tells the version. Exit codes: 0
good, 1 the check or the run failed, 2 wrong usage or configuration (one line that names key, value
and reason), 130 Ctrl-C.
"""


def page() -> str:
    """The whole page in Markdown. Imports every command that is installed.

    :raises RuntimeError: one of them cannot be loaded here, so the page would lack it.
    """
    points = installed()
    root: Any = typer.main.get_command(build(points))
    lines = [INTRO, "| command | does |", "|---|---|"]
    commands = {point.name: root.commands[point.name] for point in points}
    for name, command in commands.items():
        if command.help.startswith("Not available"):
            raise RuntimeError(f"{name}: {command.help}")
        lines.append(f"| [`headwater {name}`](#headwater-{name}) | {_text(command.help)} |")
    for name, command in commands.items():
        lines += ["", *_chapter(f"headwater {name}", command, "##")]
    return "\n".join(lines) + "\n"


def _chapter(title: str, command: Any, level: str) -> Iterator[str]:
    yield f"{level} {title}"
    yield ""
    yield _text(command.help)
    parts = getattr(command, "commands", {})
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one.param_type_name == "option" and one.name != "help"]
    if command.epilog:
        yield ""
        yield "```"
        yield from _examples(command.epilog)
        yield "```"
    if arguments:
        yield ""
        yield "| argument | meaning |"
        yield "|---|---|"
        for one in arguments:
            optional = "" if one.required else " May be left out."
            yield f"| `{one.metavar or one.name.upper()}` | {_text(one.help)}{optional} |"
    if options and not parts:
        yield ""
        yield "| option | value | default | meaning |"
        yield "|---|---|---|---|"
        for one in options:
            names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
            yield f"| {names} | {_value(one)} | {_default(one)} | {_text(one.help)} |"
    for name, part in parts.items():
        yield ""
        yield from _chapter(f"{title} {name}", part, level + "#")


def _examples(epilog: str) -> Iterator[str]:
    for one in re.split(r"\s{3}\|\s{3}", epilog.partition(":")[2]):
        yield _raw(one)


def _value(option: Any) -> str:
    if option.is_flag:
        return ""
    kind = option.type
    choices = getattr(kind, "choices", None)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    name = str(getattr(kind, "name", "text"))
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    named = {"int": "whole number", "float": "number", "str": "text"}
    shown: str = named.get(name, name)
    if low is not None and high is not None:
        shown += f", {low:g} to {high:g}"
    elif low is not None:
        shown += f" >= {low:g}"
    return shown + (", repeatable" if option.multiple else "")


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if option.is_flag or value is None or value == "" or callable(value):
        return ""
    return f"`{value}`"


def _raw(text: str | None) -> str:
    """Help text without its markup."""
    return " ".join((text or "").replace("\\[", "[").split())


def _text(text: str | None) -> str:
    return _raw(text).replace("|", "\\|").replace("<", "\\<")


def main(path: Path) -> None:
    """``FILE``"""
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
