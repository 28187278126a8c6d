"""Beginnings of prompts that an operator has approved: tenants may share them, and nothing behind.

A file of ``[tenancy] shared_prompts`` holds the text of a system message, or (``*.json``) the first
part of a request: ``messages`` with ``tools`` and whatever else a template reads, or ``prompt``.
What is approved are its *tokens* as far as no continuation changes them; a prompt that differs from
them in one token is not approved. No request can add to them or change where they end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.blocks import pack_tokens
from shared.errors import BadRequest, ConfigError
from shared.openai import RouteKind, parse
from shared.render import Renderer

KEY = "tenancy.shared_prompts"
MAX_BYTES = 4 * 2**20
_DATED_S = 60.0
"""Beginnings of templates that ask for the date are put into tokens anew after this time."""
_CONTINUED = ("a", " b", "\nc", "1", ".", "\n\n")
"""Ways to go on. Tokens at a seam may depend on what follows: only those that never do count."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """One approved beginning, not yet in tokens."""

    name: str
    """Its file, for messages."""
    fields: dict[str, Any]
    """Of a request: ``messages`` or ``prompt``, and what else decides how it is rendered."""

    def tokens(self, renderer: Renderer) -> bytes:
        """Its tokens, packed, as far as nothing that follows changes them.

        :raises BadRequest: the model's template or tokenizer cannot take it.
        """
        made = [tokens for fields in self._continued() for tokens in _tokens(renderer, fields)]
        return pack_tokens(_common(made))

    def _continued(self) -> Iterable[dict[str, Any]]:
        prompt = self.fields.get("prompt")
        if isinstance(prompt, list):  # token ids stay what they are
            return [self.fields]
        if isinstance(prompt, str):
            return [{**self.fields, "prompt": prompt + more} for more in _CONTINUED]
        messages = self.fields["messages"]
        asked = [{"role": "user", "content": more} for more in _CONTINUED]
        return [{**self.fields, "messages": [*messages, one]} for one in asked]


def read_approved(paths: Sequence[str]) -> tuple[Beginning, ...]:
    """The approved beginnings.

    :raises ConfigError: a file cannot be read or holds none.
    """
    return tuple(map(_read, paths))


@dataclass(frozen=True, slots=True)
class _Known:
    """The beginnings in one tokenizer's tokens."""

    beginnings: tuple[Beginning, ...]
    at: float
    prefixes: tuple[bytes, ...]
    """The longest first."""
    faults: tuple[str, ...]
    """Why some have none."""


class Approvals:
    """What is approved now, in the tokens of each tokenizer. Threads: any.

    A list that was replaced is of no effect from that moment on: until the new one is there in
    tokens, nothing is shared.
    """

    def __init__(
        self,
        beginnings: tuple[Beginning, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beginnings, self._clock = beginnings, clock
        self._known: dict[str, _Known] = {}

    def replace(self, beginnings: tuple[Beginning, ...]) -> None:
        """Another list; :meth:`reckon` is due for each tokenizer unless it says the same."""
        if beginnings != self._beginnings:
            self._beginnings = beginnings

    def due(self, tokenizer: str, renderer: Renderer) -> bool:
        """Whether :meth:`reckon` would change something, or might: some templates tell the date."""
        known = self._known.get(tokenizer)
        if known is None or known.beginnings is not self._beginnings:
            return bool(self._beginnings) or known is not None
        return renderer.dated and bool(known.beginnings) and self._clock() - known.at > _DATED_S

    def reckon(self, tokenizer: str, renderer: Renderer) -> None:
        """Have the tokens of what is approved. Takes milliseconds for each."""
        beginnings, at = self._beginnings, self._clock()
        found: set[bytes] = set()
        faults: list[str] = []
        for one in beginnings:
            try:
                tokens = one.tokens(renderer)
            except BadRequest as error:
                faults.append(f"{one.name}: {error}")
                continue
            if tokens:
                found.add(tokens)
            else:
                faults.append(f"{one.name}: no token of it stands before every continuation")
        prefixes = tuple(sorted(found, key=lambda tokens: (-len(tokens), tokens)))
        self._known[tokenizer] = _Known(beginnings, at, prefixes, tuple(faults))

    def find(self, tokenizer: str, tokens: bytes) -> bytes:
        """The longest approved beginning of a prompt (all its tokens, packed); empty: none."""
        known = self._known.get(tokenizer)
        if known is None or known.beginnings is not self._beginnings:
            return b""
        return next((one for one in known.prefixes if tokens.startswith(one)), b"")

    def faults(self, tokenizer: str, *, able: bool) -> tuple[str, ...]:
        """Why a model's tenants do not share what is approved; ``able``: its workers can."""
        if not self._beginnings:
            return ()
        if not able:
            return ("shared_prompts are not shared: not all of its workers are able to",)
        known = self._known.get(tokenizer)
        return () if known is None else known.faults


def _tokens(renderer: Renderer, fields: dict[str, Any]) -> list[list[int]]:
    kind = RouteKind.CHAT if "messages" in fields else RouteKind.COMPLETIONS
    request = parse(kind, msgspec.json.encode({**fields, "model": "m"}))
    return list(renderer.encode_request(request).prompts)


def _common(prompts: Sequence[Sequence[int]]) -> list[int]:
    first, *others = prompts
    size = min(map(len, prompts))
    for other in others:
        size = next((i for i in range(size) if first[i] != other[i]), size)
    return list(first[:size])


def _read(name: str) -> Beginning:
    path = Path(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(KEY, name, error.strerror or "cannot be read") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(KEY, name, f"has more than {MAX_BYTES >> 20} MiB")
    try:
        return Beginning(name, _fields(data, as_json=path.suffix == ".json"))
    except (BadRequest, UnicodeDecodeError) as error:
        # Without the cause: it may quote the file, and that belongs in no log.
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else _blame(error)
        raise ConfigError(KEY, name, reason) from None


def _fields(data: bytes, *, as_json: bool) -> dict[str, Any]:
    if not as_json:
        text = data.decode().removesuffix("\n").removesuffix("\r")
        if not text:
            raise BadRequest("it is empty")
        return {"messages": [{"role": "system", "content": text}]}
    kind = RouteKind.CHAT if b'"messages"' in data else RouteKind.COMPLETIONS
    request = parse(kind, data)
    prompt = request.prompt
    if kind is RouteKind.COMPLETIONS and not (
        isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    ):
        raise BadRequest("needs one prompt", param="prompt")
    return request.fields


def _blame(error: BadRequest) -> str:
    where = f" ('{error.param}')" if error.param else ""
    return f"is no text of a system message and no beginning of a request{where}"
