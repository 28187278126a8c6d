"""Keeps web pages away from a listener without a token, which their visitor's browser can reach.

A page of another site can send simple POSTs (a foreign ``Origin``), and under a name that it has
pointed to this machine (DNS rebinding) even read answers (a foreign ``Host``). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from shared.errors import Forbidden

OWN_PAGES = ("same-origin", "none")
"""``Sec-Fetch-Site`` of a page of ours, and of an address typed in."""


def is_loopback(host: str) -> bool:
    """Only this machine can reach a listener on ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_foreign_pages(headers: Mapping[str, str], *, page: bool = False) -> None:
    """Raise ``Forbidden`` if a page that is not ours may have sent this, or may read the answer.

    :param page: see :func:`refuse_other_sites`.
    """
    refuse_other_sites(headers, page=page)
    if not _is_local(headers.get("Host", "")):
        raise Forbidden("Without an admin token this is reached by address or local name only.")


def refuse_other_sites(headers: Mapping[str, str], *, page: bool = False) -> None:
    """Raise ``Forbidden`` if a page that is not ours may have sent this.

    :param page: what is asked for is a page of ours that tells nothing: a link to it may be
        followed from anywhere.
    """
    host = headers.get("Host", "")
    origin = headers.get("Origin")
    if origin is not None and _authority(origin) != host.lower():
        raise Forbidden("Requests made by other sites' pages are not accepted here.")
    if page and headers.get("Sec-Fetch-Mode") == "navigate":
        return
    if headers.get("Sec-Fetch-Site", "none") not in OWN_PAGES:
        raise Forbidden("Requests made by other sites' pages are not accepted here.")


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_local(host: str) -> bool:
    """An address or a name without a dot: nobody outside can point those to this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if "." not in name.rstrip(".") or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
