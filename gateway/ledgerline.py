"""The ledger's schema: one attempt as a line of JSON, and back. ``docs/ledger.md`` is made from it.

    version 1   lines without ``v``
    version 2   ``v`` is 2; usual values of ``route``, ``policy`` and ``trust`` are left out; new:
                ``path why alt rr prompt matched cid``

Readers take every version up to :data:`VERSION` and refuse later ones by name. A line never holds
prompt text; what stands for a prompt's beginning (``family``, ``path``) is a keyed hash of a hash.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from hashlib import blake2b
from itertools import compress
from typing import Annotated

import msgspec
from msgspec.structs import astuple

from gateway.records import Outcome, RequestRecord, Shadow, TokenFlow, Why

VERSION = 2
NAME_CHARS = 120
"""Longest name kept: clients choose some of them (the model), and a line has to stay short."""
CLIENT_ID_CHARS = 64
ROUTE, POLICY, TRUST = "/v1/chat/completions", "cost", "exact"
"""The usual values, not written since version 2."""
_PATH_BYTES = 3
_PATH_CHARS = 4

_SHORTER = {
    "available": "avail",
    "diverted_for_load": "load",
    "stale_index": "stale",
    "token_mismatch": "mismatch",
}
FLOW_KEYS = {name: _SHORTER.get(name, name) for name in TokenFlow.__struct_fields__}
"""Field of ``TokenFlow`` -> its key in a line's ``flow``."""
_FLOW_KEYS = tuple(FLOW_KEYS.values())
_FLOW_NAMES = {key: name for name, key in FLOW_KEYS.items()}


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Dropped(msgspec.Struct, frozen=True):
    """A line that says how many records could not be kept before ``at``."""

    at: float
    dropped: int


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record as it stands in the file; ``report/load.py`` reads these names in SQL.

    Defaults are those of version 1; a line of version 2 may also leave out what
    :data:`ROUTE`, :data:`POLICY` and :data:`TRUST` say.
    """

    v: Annotated[int, _doc("Version of the schema; absent in version 1.")] = 1
    at: Annotated[float, _doc("Arrival, seconds since the epoch.")]
    id: Annotated[str, _doc("The request: the gateway's own id.")]
    cid: Annotated[
        str, _doc("The client's `x-request-id`, if it sent one of up to 64 plain characters.")
    ] = ""
    attempt: Annotated[int, _doc("Which attempt of the request; 0: rejected without one.")] = (
        msgspec.field(default=1, name="try")
    )
    final: Annotated[bool, _doc("It was the request's last attempt.")] = True
    route: Annotated[str | None, _doc(f"Route of the API; absent: `{ROUTE}`.")] = None
    model: Annotated[str, _doc("As the client named it.")]
    tenant: Annotated[str, _doc("Who asked, if there are tenants.")] = ""
    family: Annotated[
        str, _doc("Keyed hash of the prompt's first 64 tokens (first 16, if it is shorter).")
    ] = ""
    path: Annotated[
        str, _doc("Keyed hashes after 128, 256, 512, ... tokens, four characters each.")
    ] = ""
    policy: Annotated[str | None, _doc(f"Who decided; absent: `{POLICY}`.")] = None
    worker: Annotated[str, _doc("Who was asked.")] = ""
    trust: Annotated[
        str | None, _doc(f"How far the index was believed for the worker; absent: `{TRUST}`.")
    ] = None
    outcome: Annotated[Outcome, _doc("How the attempt ended.")] = Outcome.OK
    status: Annotated[int, _doc("HTTP status.")] = 200
    flow: Annotated[dict[str, int], _doc("Where the prompt tokens went; zeros are left out.")] = {}
    out: Annotated[int, _doc("Answer tokens.")] = 0
    decided_s: Annotated[float, _doc("Arrival to decision.")] = 0.0
    ttft_s: Annotated[float | None, _doc("Arrival to first content, if there was any.")] = None
    total_s: Annotated[float, _doc("Arrival to end.")] = 0.0
    itl_s: Annotated[float | None, _doc("Mean time between two contents.")] = None
    predicted_ttft_s: Annotated[float | None, _doc("Expected arrival to first content.")] = (
        msgspec.field(default=None, name="predicted_s")
    )
    reported: Annotated[bool, _doc("`false`: the engine told no `cached_tokens`.")] = True
    prompt: Annotated[
        int | None, _doc("Prompt tokens as counted beforehand; absent: as in `flow`.")
    ] = None
    matched: Annotated[
        int | None, _doc("Tokens that the worker was believed to hold; absent: `captured`.")
    ] = None
    why: Annotated[str, _doc("Code of the reason, `:` and the term of the cost that mattered.")] = (
        ""
    )
    alt: Annotated[
        tuple[str, int, float] | None,
        _doc("The worker to compare with, what it held, and by how much it was dearer."),
    ] = None
    rr: Annotated[
        tuple[int, float] | None,
        _doc("The worker whose turn it was: what it held, and its expected time to first content."),
    ] = None


_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(LedgerLine).decode
_decode_dropped = msgspec.json.Decoder(Dropped).decode


def short(name: str) -> str:
    """A name as UTF-8 can carry it (clients can send lone surrogates), and not too long."""
    if not name.isascii():
        name = name.encode("utf-8", "replace").decode()
    return name if len(name) <= NAME_CHARS else name[: NAME_CHARS - 1] + "…"


def _fine(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)


def _unless(value: int, usual: int) -> int | None:
    return None if value == usual else value


def _family(name: str, salt: bytes) -> str:
    if not salt or not name:
        return short(name)
    return blake2b(name.encode("utf-8", "replace"), key=salt, digest_size=4).hexdigest()


def _path(keys: tuple[int, ...], salt: bytes) -> str:
    raw = b"".join(
        blake2b(key.to_bytes(4, "little"), key=salt, digest_size=_PATH_BYTES).digest()
        if salt
        else (key & 0xFFFFFF).to_bytes(_PATH_BYTES, "big")
        for key in keys
    )
    return base64.urlsafe_b64encode(raw).decode()


def path_keys(path: str) -> tuple[int, ...]:
    """The marks of a ``path``, 24 bits each."""
    try:
        raw = base64.urlsafe_b64decode(path)
    except ValueError as error:
        raise msgspec.ValidationError(f"Object has a path that is no base64: {error}") from error
    return tuple(
        int.from_bytes(raw[at : at + _PATH_BYTES], "big") for at in range(0, len(raw), _PATH_BYTES)
    )


def encode_dropped(at: float, dropped: int) -> bytes:
    """The line that tells of lost records."""
    return _encode(Dropped(at=round(at, 3), dropped=dropped)) + b"\n"


def encode_record(record: RequestRecord, salt: bytes = b"") -> bytes:
    """One line with its newline. Durations are rounded to some 10 us, the arrival to 1 ms.

    :param salt: keys the hashes of ``family`` and ``path``; empty writes them as they are.
    """
    terms = astuple(record.flow)
    flow = dict(zip(compress(_FLOW_KEYS, terms), filter(None, terms), strict=True))
    why, shadow = record.why, record.round_robin
    line = LedgerLine(
        v=VERSION,
        at=round(record.at, 3),
        id=short(record.request_id),
        cid=record.client_id if len(record.client_id) <= CLIENT_ID_CHARS else "",
        attempt=record.attempt,
        final=record.final,
        route=None if record.route == ROUTE else short(record.route),
        model=short(record.model),
        tenant=short(record.tenant),
        family=_family(record.family, salt),
        path=_path(record.path, salt) if record.path else "",
        policy=None if record.policy == POLICY else short(record.policy),
        worker=short(record.worker),
        trust=None if record.trust == TRUST else record.trust,
        outcome=record.outcome,
        status=record.status,
        flow=flow,
        out=record.output_tokens,
        decided_s=round(record.decided_s, 5),
        ttft_s=_fine(record.ttft_s),
        total_s=round(record.total_s, 4),
        itl_s=_fine(record.itl_s),
        predicted_ttft_s=_fine(record.predicted_ttft_s),
        reported=record.reported,
        prompt=_unless(record.prompt_tokens, record.flow.prompt),
        matched=_unless(record.matched_tokens, record.flow.captured),
        why="" if why is None else f"{why.code}:{why.term}" if why.term else why.code,
        alt=(short(why.other), why.other_matched, _four(why.gap)) if why and why.other else None,
        rr=None if shadow is None else (shadow.matched_tokens, _four(shadow.ttft_s)),
    )
    return _encode(line) + b"\n"


def _four(value: float) -> float:
    return round(value, 4)


def decode_record(line: bytes) -> RequestRecord | Dropped:
    """Inverse of :func:`encode_record`, for every version up to :data:`VERSION`.

    :raises msgspec.DecodeError: the line is not JSON (torn, garbled).
    :raises msgspec.ValidationError: it is JSON, but no record (a subclass of the former).
    """
    try:
        read = _decode_line(line)
    except msgspec.ValidationError:
        if b'"dropped":' not in line:
            raise
        return _decode_dropped(line)
    if read.v > VERSION:
        raise msgspec.ValidationError(
            f"Object has version {read.v} of the ledger; this reader knows up to {VERSION}"
        )
    unknown = read.flow.keys() - _FLOW_NAMES.keys()
    if unknown:
        raise msgspec.ValidationError(f"Object has unknown flow terms {sorted(unknown)}")
    return _record(read)


def _record(read: LedgerLine) -> RequestRecord:
    flow = TokenFlow(**{_FLOW_NAMES[key]: tokens for key, tokens in read.flow.items()})
    usual: Callable[[str | None, str], str] = lambda value, default: (  # noqa: E731
        value if value is not None else default if read.v > 1 else ""
    )
    if read.v == 1 and read.route is None:
        raise msgspec.ValidationError("Object missing required field `route`")
    return RequestRecord(
        at=read.at,
        request_id=read.id,
        attempt=read.attempt,
        final=read.final,
        route=usual(read.route, ROUTE),
        model=read.model,
        tenant=read.tenant,
        family=read.family,
        path=path_keys(read.path),
        policy=usual(read.policy, POLICY),
        worker=read.worker,
        trust=usual(read.trust, TRUST),
        outcome=read.outcome,
        status=read.status,
        flow=flow,
        output_tokens=read.out,
        decided_s=read.decided_s,
        ttft_s=read.ttft_s,
        total_s=read.total_s,
        itl_s=read.itl_s,
        predicted_ttft_s=read.predicted_ttft_s,
        reported=read.reported,
        prompt_tokens=flow.prompt if read.prompt is None else read.prompt,
        matched_tokens=flow.captured if read.matched is None else read.matched,
        client_id=read.cid,
        why=_why(read),
        round_robin=None
        if read.rr is None
        else Shadow(matched_tokens=read.rr[0], ttft_s=read.rr[1]),
    )


def _why(read: LedgerLine) -> Why | None:
    if not read.why:
        return None
    code, _, term = read.why.partition(":")
    other, matched, gap = read.alt or ("", 0, 0.0)
    return Why(code=code, term=term, other=other, other_matched=matched, gap=gap)
