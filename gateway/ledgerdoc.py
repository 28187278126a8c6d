"""Writes the schema into ``docs/ledger.md``, between its two marks: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from gateway.ledgerline import FLOW_KEYS, VERSION, LedgerLine

BEGIN, END = "<!-- schema: made from the code -->", "<!-- end of schema -->"


def schema() -> str:
    """The tables, in Markdown."""
    hints = get_type_hints(LedgerLine, include_extras=True)
    lines = [f"Version {VERSION}.", "", "| key | type | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(LedgerLine):
        hint, text = _described(hints[field.name])
        optional = "" if field.required else ", may be absent"
        lines.append(f"| `{field.encode_name}` | {_kind(hint)}{optional} | {text} |")
    renamed = [f"`{key}` is `{name}`" for name, key in FLOW_KEYS.items() if key != name]
    same = [f"`{key}`" for name, key in FLOW_KEYS.items() if key == name]
    lines += ["", f"In `flow`: {', '.join(same)}; {', '.join(renamed)}."]
    return "\n".join(lines)


def _described(hint: Any) -> tuple[Any, str]:
    assert get_origin(hint) is Annotated, "each field says what it means"
    kind, *metas = get_args(hint)
    text = next(meta.description for meta in metas if isinstance(meta, msgspec.Meta))
    assert text, "each field says what it means"
    return kind, text


def _kind(hint: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    members = [arg for arg in get_args(hint) if arg is not type(None)]
    if get_origin(hint) is dict:
        return "object of integers"
    if get_origin(hint) is tuple:
        return f"list of {', '.join(_kind(member) for member in members)}"
    if members:
        return _kind(members[0])
    return names.get(hint, "text")


def update(text: str) -> str:
    """A page with its schema replaced."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{schema()}\n\n{END}{tail}"


def main(path: Path) -> None:
    """Rewrite a page in place."""
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
