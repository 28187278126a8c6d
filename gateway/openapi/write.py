"""Writes the documents and the tables of docs/http.md: ``make docs``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gateway.openapi import adminpaths, public
from gateway.openapi.schemas import Schema

BEGIN, END = "<!-- {}: made from the code -->", "<!-- end of {} -->"


def encoded(document: Schema) -> str:
    """As it is shipped."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def documents() -> dict[str, Schema]:
    """By the name of the file."""
    return {"public": public.document(), "admin": adminpaths.document()}


def _routes(document: Schema) -> str:
    rows = ["| route | does | answers |", "|---|---|---|"]
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            kinds = ", ".join(f"`{kind}`" for kind in told["responses"]["200"]["content"])
            rows.append(f"| `{method.upper()} {path}` | {told['summary']} | {kinds} |")
    return "\n".join(rows)


def _headers(document: Schema) -> str:
    asked = document["components"]["parameters"]
    rows = ["| a client may send | meaning |", "|---|---|"]
    rows += [f"| `{name}` | {told['description']} |" for name, told in asked.items()]
    rows += ["", "| the gateway answers | meaning |", "|---|---|"]
    post = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
    shared = document["components"]["headers"]
    for name, told in post["headers"].items():
        rows.append(f"| `{name}` | {shared[told['$ref'].rsplit('/', 1)[1]]['description']} |")
    return "\n".join(rows)


def _errors(document: Schema) -> str:
    rows = ["| status | means |", "|---|---|"]
    for name, told in document["components"]["responses"].items():
        later = " `Retry-After` says when." if "headers" in told else ""
        rows.append(f"| {name.removeprefix('Error')} | {told['description']}{later} |")
    return "\n".join(rows)


def update(page: str) -> str:
    """A page with its tables replaced."""
    made = documents()
    tables = {
        "public routes": _routes(made["public"]),
        "headers": _headers(made["public"]),
        "errors": _errors(made["public"]),
        "admin routes": _routes(made["admin"]),
    }
    for name, table in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no place for {name}")
        page = f"{head}{begin}\n\n{table}\n\n{end}{tail}"
    return page


def main(folder: Path, page: Path) -> None:
    """``FOLDER PAGE``"""
    for name, document in documents().items():
        (folder / f"{name}.json").write_text(encoded(document), encoding="utf-8")
    page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
