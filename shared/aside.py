"""What takes long runs beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def aside(long: bool, work: Callable[..., T], *args: Any) -> T:
    """``work(*args)``, on a thread if it takes ``long``; raises what it raises."""
    return await asyncio.to_thread(work, *args) if long else work(*args)
