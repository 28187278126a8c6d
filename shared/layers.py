"""Layered settings: defaults < TOML file < environment < flags, into nested frozen structs.

Each source is flattened to dotted keys (``"section.key"``), each value is converted to its key's
type by itself, and only then the structs are built: so every error names one key, its value and the
reason.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from shared.errors import ConfigError

ENV_PREFIX = "HEADWATER_"

PROCESS_SECTIONS = frozenset(
    {"listen", "workers", "discovery", "routing", "render", "ledger", "admission", "tenancy"}
    | {"model", "cache", "schedule", "fake", "serve"}
)
"""Sections that only one kind of process has. An environment is often shared by several processes,
so a variable of another process's section is no mistake; any other unknown section is one."""

S = TypeVar("S", bound=msgspec.Struct)

_SECRET = re.compile(r"(?:^|[._])(?:token|secret|password|api_keys?)$")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Given:
    """A value from one source."""

    value: Any
    source: str = ""
    """Name of the environment variable, for messages; empty for file and flags."""
    lax: bool = False
    """From the environment or a flag: text is coerced to the key's type."""


def load(cls: type[S], *, file: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> S:
    """Settings from all sources; the later ones win: defaults, file, environment, flags.

    :param file: TOML; None for no file.
    :param env: ``HEADWATER_SECTION__KEY`` -> text: numbers and booleans as usual, lists with commas
        (or as JSON), tables as JSON. Names of another form are ignored, but for those that only
        lack an underscore.
    :param flags: ``"section.key"`` -> value; None means not given.
    :raises ConfigError: one key, its value and the reason.
    """
    given: dict[str, Given] = {}
    if file is not None:
        given.update(_flatten(cls, read_toml(file)))
    keys = dict(leaves(cls))
    for path, one in _from_environment(cls, env):
        _require(keys, path, one)
        given[path] = one
    for path, value in flags.items():
        if value is not None:
            _require(keys, path, Given(value))
            given[path] = Given(value, lax=True)
    values = {path: _convert(path, one, keys[path].type) for path, one in given.items()}
    return _build(cls, "", values)


def read_toml(file: Path) -> dict[str, Any]:
    """The parsed file; raises :class:`ConfigError` if it cannot be read or is no TOML."""
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError("file", str(file), error.strerror or "cannot be read") from error
    except (tomllib.TOMLDecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError("file", str(file), f"is not valid TOML: {error}") from error


def env_name(path: str) -> str:
    """Name of the environment variable of a dotted key."""
    return ENV_PREFIX + path.replace(".", "__").upper()


def leaves(cls: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that can be set: its dotted name and its field."""
    for field in msgspec.structs.fields(cls):
        section = struct_of(field.type)
        if section is None:
            yield prefix + field.encode_name, field
        else:
            yield from leaves(section, f"{prefix}{field.encode_name}.")


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """The struct class behind a field's type; None if it is no section."""
    base = bare(kind)
    return base if isinstance(base, type) and issubclass(base, msgspec.Struct) else None


def bare(kind: Any) -> Any:
    """A type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


# --- sources to dotted keys ----------------------------------------------------------------------


def _from_environment(
    cls: type[msgspec.Struct], env: Mapping[str, str]
) -> Iterator[tuple[str, Given]]:
    own = {field.encode_name for field in msgspec.structs.fields(cls)}
    nearly = {env_name(path).replace("__", "_"): path for path, _ in leaves(cls)}
    for name, text in sorted(env.items()):
        if name in nearly:  # one underscore where two belong: its author means us
            path = nearly[name]
            reason = f"unknown key; did you mean {env_name(path)}?"
            raise _error(path, Given(text, source=name), reason)
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        section = path.split(".", 1)[0]
        if section in own or section not in PROCESS_SECTIONS:
            yield path, Given(text, source=name, lax=True)


def _flatten(
    cls: type[msgspec.Struct],
    table: Mapping[str, Any],
    prefix: str = "",
    everywhere: Sequence[str] = (),
) -> Iterator[tuple[str, Given]]:
    """Dotted keys of a TOML table; ``everywhere``: all keys of all sections."""
    everywhere = everywhere or [key for key, _ in leaves(cls, prefix)]
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    for name, value in table.items():
        path = prefix + name
        field = fields.get(name)
        if field is None:
            siblings = [prefix + known for known in fields]
            raise _unknown(path, Given(value), siblings, everywhere)
        section = struct_of(field.type)
        if section is None:
            yield path, Given(value)
        elif isinstance(value, dict):
            yield from _flatten(section, value, path + ".", everywhere)
        else:
            raise _error(path, Given(value), f"is a section: write [{path}] and its keys below")


def _require(keys: Mapping[str, FieldInfo], path: str, one: Given) -> None:
    """Refuse a dotted key that does not exist."""
    if path not in keys:
        raise _unknown(path, one, keys, keys)


def _unknown(
    path: str, one: Given, siblings: Iterable[str], everywhere: Iterable[str]
) -> ConfigError:
    """Error with the nearest existing key, or the key of the same name in another section."""
    name = path.rpartition(".")[2]
    moved = [key for key in everywhere if key.rpartition(".")[2] == name]
    near = list(siblings)
    close = difflib.get_close_matches(path, near, n=1, cutoff=0.9)
    close = close or difflib.get_close_matches(path, moved, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(path, near, n=1, cutoff=0.75)
    if not close:
        return _error(path, one, "unknown key")
    best = close[0]
    hint = env_name(best) if one.source else best
    return _error(path, one, f"unknown key; did you mean {hint}?")


def _error(path: str, one: Given, reason: str) -> ConfigError:
    shown = "***" if _SECRET.search(path) else one.value
    return ConfigError(path, shown, f"{reason} (from {one.source})" if one.source else reason)


# --- values --------------------------------------------------------------------------------------


def _convert(path: str, one: Given, kind: Any) -> Any:
    """The value in its key's type."""
    text = one.lax and isinstance(one.value, str)
    value = _coerce(path, one, bare(kind)) if text else one.value
    try:
        return msgspec.convert(value, kind, strict=not text)
    except msgspec.ValidationError as error:
        reason, _, inside = str(error).partition(" - at `")
        inside = inside.rstrip("`").removeprefix("key in ").removeprefix("$")
        raise _error(path + inside, one, _friendly(reason, kind, text=text)) from None


def _friendly(reason: str, kind: Any, *, text: bool) -> str:
    """A conversion error in words that fit a settings file."""
    if get_origin(bare(kind)) is Literal:
        return "must be one of " + ", ".join(map(str, get_args(bare(kind))))
    return reason.removesuffix(", got `str`") if text else reason


def _coerce(path: str, one: Given, base: Any) -> Any:
    """Text of an environment variable in the shape of its key's type."""
    text = str(one.value)
    if base is bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise _error(path, one, "Expected `bool`: true or false")
        return word in _TRUE
    container = get_origin(base) or base
    if container is dict or (container in (list, tuple) and text.lstrip().startswith("[")):
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _error(path, one, f"is not valid JSON: {error}") from None
    if container in (list, tuple):
        return [item.strip() for item in text.split(",") if item.strip()]
    return text if base is str else text.strip()


def _build(cls: type[S], prefix: str, values: Mapping[str, Any]) -> S:
    """The struct from its converted values; keys not given keep their defaults."""
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(cls):
        path = prefix + field.encode_name
        section = struct_of(field.type)
        if section is not None:
            arguments[field.name] = _build(section, path + ".", values)
        elif path in values:
            arguments[field.name] = values[path]
        elif field.required:
            raise ConfigError(path, None, "is required")
    try:
        return cls(**arguments)
    except ValueError as error:  # a struct's own __post_init__
        raise ConfigError(prefix.rstrip(".") or cls.__name__, "", str(error)) from error
