"""Writes ``docs/configuration.md`` from the settings structs.

    python -m shared.configdoc docs/configuration.md gateway.config:GatewayConfig ...

The structs are named on the command line: this module knows no process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from shared.errors import ConfigError
from shared.layers import bare, env_name, struct_of

INTRO = """\
# Configuration

Generated from the code by `make docs`; do not edit.

A process reads one TOML file (`-c FILE`); a key `section.key` can also be given in the environment
as `HEADWATER_SECTION__KEY`, and the common ones as flags (`headwater COMMAND --help`). The order is
flag > environment > file > default. Lists in the environment are separated by commas, tables are
JSON. An unknown key is an error. `headwater gateway --check -c FILE` checks one and leaves.

A running gateway reads its sources again on SIGHUP, and when the file has changed. It takes over
`workers.urls`, `workers.request_timeout_s`, all of `[discovery]`, `[admission]` and `[tenancy]`,
`routing.policy`, `routing.options`, `routing.allow_policy_header`, `routing.retries`,
`routing.prefix_hash_tokens`,
`routing.prefix_hash_load_factor`, `listen.max_body_mib`, `listen.headers`, `listen.api_keys`,
`listen.drain_s` and `log.level`; of what else has changed it logs the names and tells them in the
notes of `/ready` until it is restarted. A file that no gateway could start with changes nothing,
and is told about in the same places.
"""


def document(structs: Iterable[type[msgspec.Struct]]) -> str:
    """The whole page in Markdown, one chapter per struct."""
    return "\n".join([INTRO, *(_chapter(cls) for cls in structs)])


def _chapter(cls: type[msgspec.Struct]) -> str:
    title = cls.__name__.removesuffix("Config").lower()
    lines = [f"## headwater {title}", "", _first_paragraph(cls), ""]
    for field in msgspec.structs.fields(cls):
        section = struct_of(field.type)
        if section is None:
            raise ConfigError(field.encode_name, "", "a key outside of any section")
        lines += _section(field.encode_name, section)
    return "\n".join(lines)


def _section(path: str, cls: type[msgspec.Struct]) -> list[str]:
    lines = [f"### [{path}]", "", _first_paragraph(cls), ""]
    rows, nested = [], []
    for field in msgspec.structs.fields(cls):
        name = f"{path}.{field.encode_name}"
        inner = struct_of(field.type)
        if inner is None:
            rows.append(_row(name, field))
        else:
            nested += _section(name, inner)
    if rows:
        lines += ["| key | type | default | environment | meaning |", "|---|---|---|---|---|"]
        lines += [*rows, ""]
    return lines + nested


def _row(path: str, field: FieldInfo) -> str:
    default = "required" if field.required else f"`{_toml(_default(field))}`"
    cells = (
        f"`{field.encode_name}`",
        type_name(field.type),
        default,
        f"`{env_name(path)}`",
        meaning(field.type),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _toml(value: Any) -> str:
    """A default as it would stand in the file."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _notes(kind: Any) -> list[msgspec.Meta]:
    if get_origin(kind) is not Annotated:
        return []
    return [note for note in get_args(kind)[1:] if isinstance(note, msgspec.Meta)]


def meaning(kind: Any) -> str:
    """The text that ``settings.doc`` gave a key."""
    return " ".join(note.description for note in _notes(kind) if note.description)


def type_name(kind: Any) -> str:
    """A type in words, with its range."""
    base = bare(kind)
    limits = [limit for note in _notes(kind) for limit in _limits(note)]
    return " ".join([_base_name(base), *limits])


def _limits(note: msgspec.Meta) -> list[str]:
    pairs = ((">=", note.ge), (">", note.gt), ("<=", note.le), ("<", note.lt))
    limits = [f"{sign} {bound}" for sign, bound in pairs if bound is not None]
    return limits + ([f"like `{note.pattern}`"] if note.pattern is not None else [])


def _base_name(base: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    if base in names:
        return names[base]
    origin, inner = get_origin(base), get_args(base)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin in (tuple, list):
        return f"list of {type_name(inner[0])}"
    if origin is dict:
        return f"table of {type_name(inner[1])}"
    if origin in (Union, UnionType):
        return " or ".join(type_name(one) for one in inner if one is not NoneType)
    return str(getattr(base, "__name__", base))


def _first_paragraph(cls: type[msgspec.Struct]) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def find(name: str) -> type[msgspec.Struct]:
    """The struct that ``module:Class`` names; raises :class:`ConfigError`."""
    module, _, attribute = name.partition(":")
    found = getattr(import_module(module), attribute, None)
    if not isinstance(found, type) or not issubclass(found, msgspec.Struct):
        raise ConfigError("struct", name, "is no settings struct; write module:Class")
    return found


def main(arguments: Sequence[str]) -> None:
    """``OUTPUT module:Class ...``"""
    output, *names = arguments
    Path(output).write_text(document(map(find, names)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
