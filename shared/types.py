"""Identifiers: plain values at run time, told apart by the type checker."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

WorkerId = NewType("WorkerId", str)
"""Name of a worker, stable over restarts of the same address (default: ``host:port``)."""

RequestId = NewType("RequestId", str)
"""Made by us for each request; what the client sent is only echoed."""

BlockKey = NewType("BlockKey", int)
"""Low 64 bits of a chained granule hash (``shared.blocks``), 0 <= key < 2**64."""

Epoch = NewType("Epoch", int)
"""One incarnation of a worker: ``start_ms << 16 | rand16``, made by the worker itself."""


class Tier(StrEnum):
    """Where a cached block lives."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
