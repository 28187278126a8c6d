"""``model.pin``: what it means, and what it must not touch."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from worker.placement import pinned_cores

ALLOWED = frozenset(range(12))


@pytest.mark.parametrize(
    ("pin", "cores"),
    [
        ("none", set()),
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        (" 2 , 4-4", {2, 4}),
        ("3,3,2-4", {2, 3, 4}),
    ],
)
def test_cores(pin: str, cores: set[int]) -> None:
    assert pinned_cores(pin, ALLOWED) == cores


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        *((pin, "cores such as") for pin in ("", "a", "1-", "-1", "1,,2", "1.5", "0-999999", "²")),
        ("3-1", "empty range"),
        ("0-12", "core 12 is not"),
        ("99", "core 99 is not"),
    ],
)
def test_what_is_no_set_of_cores(pin: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.pin.*{reason}"):
        pinned_cores(pin, ALLOWED)


def test_where_threads_cannot_be_bound() -> None:
    assert pinned_cores("none", None) == set()
    with pytest.raises(ConfigError, match="Linux only"):
        pinned_cores("0", None)
