"""JSON as engines write it. Pure.

Python's own encoder, which many engines use, writes ``NaN`` and ``Infinity`` (a log-probability,
say) and halves of surrogate pairs (a character cut between two tokens). Clients read both, so what
carries them is no garbage: it must neither be dropped nor fail a request.
"""

from __future__ import annotations

import json

import msgspec

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class NotJson(ValueError):
    """No reader would take it."""


def decode(data: bytes | str) -> object:
    """The decoded value; raises :class:`NotJson`."""
    try:
        return _decode(data)
    except RecursionError:
        raise NotJson("nested too deeply") from None
    except msgspec.DecodeError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def encode(value: object) -> bytes:
    """Inverse of :func:`decode`: lone surrogates are escaped. ``NaN`` becomes null."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()
