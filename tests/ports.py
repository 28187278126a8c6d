"""Ports of the loopback interface, such that test processes side by side never take each other's.

All lie below those that the kernel gives to clients, so that one stays free until it is listened
on, and when who listened there comes back.

12,000 to 19,999   one by one, in turn for each test process
20,000 to 21,999   several in a row, a part for each test process
22,000 to 29,999   the second ports of the nodes of a Redis cluster, 10,000 above the first ones:
                   fixed there (before 7.0)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

_SINGLE = range(12_000, 20_000)
_IN_A_ROW = range(20_000, 22_000)
_BUS = 10_000
_LANES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_LANE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def _turns(ports: Sequence[int]) -> Iterator[int]:
    """Each of them once in a while, for ever."""
    start = os.getpid() * 61 % len(ports)
    while True:
        yield from (*ports[start:], *ports[:start])


_next_port = _turns(_SINGLE[_LANE::_LANES])
_part = len(_IN_A_ROW) // _LANES
_rows = {"next": os.getpid() * 61 % _part}


def _free(*ports: int) -> bool:
    """Whether nobody has any of them."""
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def pick_port() -> int:
    """A port that was free a moment ago."""
    return next(port for port in _next_port if _free(port))


def pick_port_with_bus() -> int:
    """One whose fixed second one, 10,000 above, is free as well."""
    return next(port for port in _next_port if _free(port, port + _BUS))


def pick_row(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    for _ in range(2 * (_part // count)):
        offset = _rows["next"] if _rows["next"] + count <= _part else 0
        _rows["next"] = offset + count
        first = _IN_A_ROW[_LANE * _part + offset]
        if _free(*range(first, first + count)):
            return first
    raise RuntimeError("no free ports in a row")
