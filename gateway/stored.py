"""Stored responses of ``/v1/responses``: looked at, deleted, cancelled where they are. Pure."""

from __future__ import annotations

from urllib.parse import unquote

STORED: dict[str, tuple[str, ...]] = {
    "/v1/responses/{id}": ("GET", "DELETE"),
    "/v1/responses/{id}/input_items": ("GET",),
    "/v1/responses/{id}/cancel": ("POST",),
}
"""Routes, each with its methods."""
_ROOT = "/v1/responses/"
_MAX_NAME = 256


def stored_route(path: str, method: str) -> str | None:
    """The route of a path that names a stored response; None: it is another one's.

    ``POST /v1/responses/compact`` and the like name none.
    """
    if not path.startswith(_ROOT):
        return None
    name, _, part = path.removeprefix(_ROOT).partition("/")
    plain = unquote(name)
    if not plain or plain in (".", "..") or not plain.isprintable() or set(plain) & set("/\\;"):
        return None
    route = f"{_ROOT}{{id}}/{part}" if part else f"{_ROOT}{{id}}"
    if path.endswith("/") or route not in STORED or (not part and method == "POST"):
        return None
    return route


def response_of(path: str) -> str:
    """The id in such a path."""
    return unquote(path.removeprefix(_ROOT).partition("/")[0])[:_MAX_NAME]
