"""Where the engine may run: the form of ``model.device``, ``model.pin`` as a set of cores."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Set as AbstractSet

from shared.errors import ConfigError

ANY_CORE = "none"
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")


def check_device(device: str, *, fake: bool) -> None:
    """Raise ``ConfigError`` for what is no device; whether it is there, only torch knows."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError("model.device", device, "must be auto, cpu or cuda:N")
    if fake and device not in ("auto", "cpu"):
        raise ConfigError("model.device", device, "the fake model runs on the CPU only")


def allowed_cores() -> frozenset[int] | None:
    """Cores that this process may use; None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else None


def pinned_cores(pin: str, allowed: AbstractSet[int] | None) -> frozenset[int]:
    """``"0-3,8"`` as core numbers; empty for :data:`ANY_CORE`.

    ``allowed``: cores this process may use; None where a thread cannot be bound to cores.
    Raises ``ConfigError`` for another form and for cores that are not allowed.
    """
    if pin == ANY_CORE:
        return frozenset()
    if allowed is None:
        raise ConfigError("model.pin", pin, "threads can be bound to cores on Linux only")
    cores: set[int] = set()
    for part in pin.split(","):
        first, dash, last = part.strip().partition("-")
        # a number of a few digits, so that no range of it fills the memory
        numbers = (first, last if dash else first)
        if not all(n.isascii() and n.isdigit() and len(n) <= 5 for n in numbers):
            raise ConfigError("model.pin", pin, "none, or cores such as 0-3,8")
        low, high = int(numbers[0]), int(numbers[1])
        if low > high:
            raise ConfigError("model.pin", pin, f"{part.strip()} is an empty range")
        cores.update(range(low, high + 1))
    missing = sorted(cores - allowed)
    if missing:
        raise ConfigError("model.pin", pin, f"core {missing[0]} is not among those to be used")
    return frozenset(cores)
