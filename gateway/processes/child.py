"""``python -m gateway.processes.child``: one of the processes, as its parent told it to be.

The order comes by the environment: it may hold a password, and flags show in ``ps``.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gateway.inherited import Inherited
from shared.errors import ConfigError
from shared.settings import load

VARIABLE = "_HEADWATER_PROCESS"
"""Not a setting: those begin without the line."""


class Order(msgspec.Struct, frozen=True):
    """What a process is told; it reads the configuration itself, so that it can read it again."""

    file: str | None
    flags: dict[str, Any]
    """As the parent got them, with what differs between processes."""
    inherited: Inherited


def encode(order: Order) -> str:
    """For :data:`VARIABLE`."""
    return msgspec.json.encode(order).decode()


def main() -> int:
    """Serve until SIGTERM; the exit code."""
    from gateway.cli.serve import run
    from gateway.config import GatewayConfig

    order = msgspec.json.decode(os.environ.pop(VARIABLE), type=Order)
    path = None if order.file is None else Path(order.file)
    read = partial(load, GatewayConfig, file=path, env=os.environ, flags=order.flags)
    return run(read(), read, path, order.inherited)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as mistake:
        sys.stderr.write(f"headwater: {mistake}\n")
        sys.exit(2)
