"""The request header by which a client says how long it is ready to wait."""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import BadRequest

TIMEOUT = "x-headwater-timeout"


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from the request's arrival to its deadline; None if the client named none.

    :raises BadRequest: the value is no number above 0.
    """
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    try:
        wanted = float(text)
    except ValueError:
        wanted = -1.0
    if not wanted > 0:
        raise BadRequest(f"'{TIMEOUT}' must be a number of seconds above 0.", param=TIMEOUT)
    return wanted
