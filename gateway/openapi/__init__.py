"""The OpenAPI documents of both listeners: shipped as files, served at ``/openapi.json``.

    requests.py, answers.py   schemas: of bodies by hand (a test holds them against the parser), of
                              admin answers from the very types that are encoded
    parts.py                  errors, headers and answers that many routes share
    public.py, adminpaths.py  the routes
    write.py                  ``make docs``: the two files here, and the tables in docs/http.md

A running gateway only reads the files; nothing else here is imported then.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

OPENAPI = "/openapi.json"
"""The route, on either listener."""


@cache
def document(which: Literal["public", "admin"]) -> bytes:
    """A shipped document, as JSON."""
    return (Path(__file__).parent / f"{which}.json").read_bytes()
