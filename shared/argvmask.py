"""Secrets given on the command line are hidden from who lists processes.

Linux shows a process's arguments from its own memory, where they can be written over: the kernel
tells the place in ``/proc/self/stat`` (fields 48 and 49 of proc(5)). Elsewhere nothing is done. A
reader that is quick enough sees them for the moment until the interpreter is up, so the environment
remains the better place for a password.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

_PASSWORD = re.compile(r"://[^/?#@\s]*?:([^\s]+)@")
"""In ``scheme://user:password@host``; up to the last ``@``, for not all who write one escape it."""
_SECRET_FLAGS = ("--token",)


def secrets_in(arguments: Sequence[str]) -> list[str]:
    """Passwords of URLs and values of secret flags among some arguments. Pure."""
    found = [secret for each in arguments for secret in _PASSWORD.findall(each)]
    for flag, value in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, rest = flag.partition("=")
        if name in _SECRET_FLAGS:
            found.append(rest if equals else value)
    return [secret for secret in found if secret]


def hide(secrets: Iterable[str]) -> None:
    """Write stars over them in what this process shows as its arguments; ``sys.argv`` stays."""
    wanted = [secret.encode() for secret in secrets]
    place = _place() if wanted else None
    if place is None:
        return
    start, size = place
    shown = ctypes.string_at(start, size)
    # A secret is a whole argument or the part of one, and longer ones may hold shorter ones.
    for secret in sorted(wanted, key=len, reverse=True):
        shown = shown.replace(secret, b"*" * len(secret))
    ctypes.memmove(start, shown, size)


def hide_arguments() -> None:
    """Hide those among this process's own arguments."""
    hide(secrets_in(sys.argv[1:]))


def _place() -> tuple[int, int] | None:
    """Where the kernel reads the arguments from, and how many bytes; None: it does not tell."""
    try:
        # What stands in brackets is the program's name, which may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return None
    return (start, end - start) if 0 < start < end else None
