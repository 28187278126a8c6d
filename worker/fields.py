"""Typed access to the decoded body of a request. Null is absent; every error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import BadRequest

SHOWN_DIGITS = 24
"""So much of a number is repeated in a message."""


def _shown(value: object) -> str:
    """A value as a message may show it: short, and never the text of a prompt."""
    if isinstance(value, bool | int | float):
        text = str(value)
        return text if len(text) <= SHOWN_DIGITS else f"{text[:SHOWN_DIGITS]}..."
    return f"a value of type {type(value).__name__}"


def wrong(name: str, value: object, wanted: str) -> BadRequest:
    """The error for a field of the wrong type or out of its range."""
    return BadRequest(f"'{name}' must be {wanted}, not {_shown(value)}.", param=name)


class Fields:
    """One JSON object's members."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        """The raw value, None if it is absent or null."""
        return self._values.get(name)

    def names(self) -> list[str]:
        """Names of the members that are not null."""
        return [name for name, value in self._values.items() if value is not None]

    def flag(self, name: str, default: bool = False) -> bool:
        """A JSON boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in ``low .. high``; a float without a fraction counts as one."""
        value = self._values.get(name)
        if value is None:
            return None
        wanted = f"an integer from {low} to {high}"
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            raise wrong(name, value, wanted)
        return int(value)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A finite number in ``low .. high``."""
        value = self._values.get(name)
        if value is None:
            return default
        wanted = f"a number from {low:g} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, value, wanted)
        # False for NaN as well. An integer may be too large to become a float: compared first.
        if not low <= value <= high:
            raise wrong(name, value, wanted)
        return float(value)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "a string")
        return value

    def texts(self, name: str, limit: int) -> tuple[str, ...]:
        """A string or a list of strings, none of them empty."""
        value = self._values.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise wrong(name, value, "a string or a list of strings")
        if len(items) > limit:
            raise BadRequest(f"'{name}' may hold at most {limit} strings.", param=name)
        if "" in items:
            raise BadRequest(f"'{name}' must not contain an empty string.", param=name)
        return tuple(items)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A list of token ids below ``vocab_size``."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise wrong(name, value, "a list of token ids")
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= vocab_size):
            odd = next(t for t in value if type(t) is not int or not 0 <= t < vocab_size)
            raise wrong(name, odd, f"token ids from 0 to {vocab_size - 1}")
        return tuple(value)

    def biases(self, name: str, vocab_size: int) -> dict[int, float]:
        """``{"token id": bias from -100 to 100}``."""
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong(name, value, "an object of token ids and biases")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
                raise BadRequest(
                    f"'{name}' has a key that is no token id below {vocab_size}.", param=name
                )
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not number or not -100 <= bias <= 100:
                raise wrong(f"{name}.{key}", bias, "a number from -100 to 100")
            biases[int(key)] = float(bias)
        return biases
