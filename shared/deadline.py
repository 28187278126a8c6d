"""The request header by which a client says how long it is ready to wait."""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import BadRequest
from shared.headernum import number

TIMEOUT = "x-headwater-timeout"


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from the request's arrival to its deadline; None if the client named none.

    :raises BadRequest: the value is no finite number above 0.
    """
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    wanted = number(text)
    if wanted is None or wanted <= 0:
        raise BadRequest(f"'{TIMEOUT}' must be a number of seconds above 0.", param=TIMEOUT)
    return wanted
