"""The trace file: which blocks each prompt had, so that traffic can be simulated and replayed.

One line of JSON a request, beside its line in the ledger (same ``id``), with keys and never with
text. Prompts begin alike, so a line only has the keys that no earlier one had:

    {"n": 7, "like": 5, "same": 130, "keys": "...", ...}

    begins with the first 130 keys of the line whose ``n`` is 5, and goes on with ``keys`` (base64
    of little-endian 64-bit numbers, one per 16 tokens)

What stands in the file are keyed hashes of the keys, with the salt of the ledger's folder: equal
where the keys are, of no use to who wants to test whether a prompt was sent.

Keys are chained hashes: two prompts that have one key in common have all before it in common, so a
table of keys finds the longest common beginning. ``n`` counts up and is never used twice; lines
refer to lines of their own file only.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from gateway.ledgerfile import NAME
from gateway.packed import BrokenOff, lines_of
from gateway.records import Outcome, RequestRecord
from gateway.routing.base import Candidate, Query
from shared.errors import HeadwaterError

FOLDER = "trace"
"""Under the ledger's folder."""
WINDOW_KEYS = 262_144
"""Keys that a writer remembers, about 25 MB; beyond it, it forgets all and begins anew."""
_NAME_CHARS = 120


class TraceFileError(HeadwaterError):
    """A trace file cannot be read; the message is one line."""


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line as it stands in the file; defaults are not written."""

    n: int
    at: float
    """Arrival, seconds since the epoch."""
    id: str
    model: str
    tokens: int
    """Of the prompt; 0 = unknown."""
    out: int = 0
    """Tokens of the answer."""
    took_s: float = 0.0
    """From the arrival to the end of the answer."""
    worker: str = ""
    """Who answered."""
    outcome: Outcome = Outcome.OK
    session: str = ""
    """A keyed hash of what the client called it."""
    like: int = 0
    same: int = 0
    keys: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    cached: int = 0
    """Prompt tokens from the cache, as the engine said."""
    max_tokens: int = 0
    policy: str = ""
    candidates: list[Candidate] = []
    """Every worker that could have been chosen, as it was at the decision, best first; only where
    ``[ledger] decisions`` is on."""


@dataclass(frozen=True, slots=True)
class Traced:
    """One request, whole again."""

    at: float
    id: str
    model: str
    prompt_tokens: int
    output_tokens: int
    took_s: float
    worker: str
    outcome: Outcome
    session: str
    keys: array[int]
    """One per full granule of 16 tokens (or per block of text), salted: only equality counts. Of a
    list of prompts those of the first one."""
    ttft_s: float | None = None
    itl_s: float | None = None
    cached_tokens: int = 0
    max_tokens: int = 0
    policy: str = ""
    candidates: tuple[Candidate, ...] = ()


class TraceEncoder:
    """Lines from requests; one per file and writer.

    :param first: ``n`` of its first line, larger than any used in the file before.
    :param salt: keys the hashes of keys and session names; up to 64 bytes.
    """

    def __init__(self, first: int, salt: bytes, window_keys: int = WINDOW_KEYS) -> None:
        self._next = first
        self._salt = salt
        self._window = window_keys
        self._known: dict[int, int] = {}
        """Key -> ``n`` of the line that brought it."""

    def restart(self) -> None:
        """The next line refers to none before it."""
        self._known.clear()

    def encode(
        self, query: Query, record: RequestRecord, candidates: Sequence[Candidate] = ()
    ) -> bytes:
        """One line with its newline."""
        if len(self._known) > self._window:
            self.restart()
        n, keys = self._next, query.keys
        self._next += 1
        same = self._common(keys)
        like = self._known[keys[same - 1]] if same else 0
        new = keys[same:]
        self._known.update(dict.fromkeys(new, n))
        line = TraceLine(
            n=n,
            at=round(record.at, 3),
            id=record.request_id,
            model=_plain(record.model),
            tokens=query.prompt_tokens or record.flow.prompt,
            out=record.output_tokens,
            took_s=round(record.total_s, 4),
            worker=_plain(record.worker),
            outcome=record.outcome,
            session=self._session(query),
            like=like,
            same=same,
            keys=b64encode(b"".join(salted(key, self._salt) for key in new)).decode(),
            ttft_s=None if record.ttft_s is None else round(record.ttft_s, 6),
            itl_s=None if record.itl_s is None else round(record.itl_s, 6),
            cached=record.flow.delivered,
            max_tokens=query.max_tokens,
            policy=record.policy,
            candidates=list(candidates),
        )
        return msgspec.json.encode(line) + b"\n"

    def _common(self, keys: Sequence[int]) -> int:
        """Keys at the beginning that are known: all before a known one are."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._known:
                low = middle + 1
            else:
                high = middle
        return low

    def _session(self, query: Query) -> str:
        if not query.session:
            return ""
        tenant = query.tenant.encode("utf-8", "surrogatepass")
        name = b"%d:%b" % (len(tenant), tenant) + query.session.encode("utf-8", "surrogatepass")
        return blake2b(name, digest_size=8, key=self._salt).hexdigest()


@dataclass(frozen=True, slots=True)
class _Chain:
    like: int
    same: int
    new: array[int]

    def __len__(self) -> int:
        return self.same + len(self.new)


class TraceDecoder:
    """Requests from the lines of one file."""

    def __init__(self) -> None:
        self._chains: dict[int, _Chain] = {}
        self._decode = msgspec.json.Decoder(TraceLine).decode

    def decode(self, line: bytes) -> Traced:
        """The request of one line.

        :raises ValueError: torn or garbled, or it refers to a line that is not there.
        """
        try:
            read = self._decode(line)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        try:
            packed = b64decode(read.keys, validate=True)
        except Base64Error as error:
            raise ValueError("keys are no base64") from error
        if len(packed) % 8:
            raise ValueError("keys are no numbers of 64 bits")
        chain = _Chain(read.like, read.same, _from_little(packed))
        keys = self._beginning(read.n, read.like, read.same)
        keys.extend(chain.new)
        self._chains[read.n] = chain
        return Traced(
            at=read.at,
            id=read.id,
            model=read.model,
            prompt_tokens=read.tokens,
            output_tokens=read.out,
            took_s=read.took_s,
            worker=read.worker,
            outcome=read.outcome,
            session=read.session,
            keys=keys,
            ttft_s=read.ttft_s,
            itl_s=read.itl_s,
            cached_tokens=read.cached,
            max_tokens=read.max_tokens,
            policy=read.policy,
            candidates=tuple(read.candidates),
        )

    def _beginning(self, n: int, like: int, same: int) -> array[int]:
        """The first ``same`` keys of line ``like``, newest part last."""
        parts: list[array[int]] = []
        while same > 0:
            chain = self._chains.get(like)
            if chain is None or like >= n or same > len(chain):
                raise ValueError(f"refers to line {like}, which is not there")
            if same > chain.same:
                parts.append(chain.new[: same - chain.same])
            n, like, same = like, chain.like, min(same, chain.same)
        keys = array("Q")
        for part in reversed(parts):
            keys.extend(part)
        return keys


def salted(key: int, salt: bytes) -> bytes:
    """What stands in the file for a key, 8 bytes."""
    return blake2b(key.to_bytes(8, "little"), digest_size=8, key=salt).digest()


def trace_files(path: Path) -> list[Path]:
    """The trace files behind a path: a file, a folder of them, or a ledger's folder.

    :raises TraceFileError: there is none.
    """
    if not path.is_dir():
        return [path]
    for folder in (path / FOLDER, path):
        found = sorted(p for p in folder.glob("*.jsonl*") if NAME.match(p.name))
        if found:
            return found
    raise TraceFileError(f"there is no trace file in it ([ledger] trace keeps them in {FOLDER}/)")


def read_traced(
    files: Iterable[Path], on_bad: Callable[[Path, int, str], None] = lambda file, line, why: None
) -> Iterator[Traced]:
    """All requests of trace files (``.gz`` too), in the order of their ends.

    :param on_bad: told about each line that cannot be read, and where a packed file breaks off.
    :raises TraceFileError: a file cannot be read.
    """
    for file in files:
        decoder = TraceDecoder()
        number = 0
        try:
            for number, line in enumerate(lines_of(file), 1):
                if not line.strip():
                    continue
                try:
                    traced = decoder.decode(line)
                except ValueError as error:
                    on_bad(file, number, str(error))
                else:
                    yield traced
        except BrokenOff as error:
            on_bad(file, number + 1, str(error))
        except OSError as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceFileError(f"{file} cannot be read: {reason}") from error


def _plain(name: str) -> str:
    """As UTF-8 can carry it (clients can send lone surrogates), and not too long."""
    return name[:_NAME_CHARS].encode("utf-8", "replace").decode()


def _from_little(packed: bytes) -> array[int]:
    numbers = array("Q")
    numbers.frombytes(packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
