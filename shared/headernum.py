"""Numbers in request headers: as JSON and HTTP write them, not all that Python would read.

``float`` and ``int`` also take ``1_0``, digits of other scripts, ``inf`` and ``nan``.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)


def number(text: str) -> float | None:
    """A finite decimal number; None if it is none."""
    if _NUMBER.fullmatch(text) is None:
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def whole(text: str, low: int, high: int) -> int | None:
    """An integer from ``low`` to ``high``; None if it is none."""
    if _WHOLE.fullmatch(text) is None:
        return None
    value = int(text)
    return value if low <= value <= high else None
