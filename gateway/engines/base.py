"""What every adapter is: a pure translator for one engine. It reads answers and writes none.

An adapter never asks: somebody fetches the paths that it names and hands over the bodies that came
(only those with a 2xx status). Whatever a peer says is a value here, never an exception, except
:class:`MalformedFrame`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from shared.jsonsplice import Edit
from shared.load import WorkerLoad
from shared.openai import Usage
from shared.types import Tier

Answers = Mapping[str, bytes]
"""Path -> body of a successful GET."""


class Reports(StrEnum):
    """What an engine says about the part of a prompt that came from its cache."""

    ALWAYS = "always"
    NOT_ZERO = "not zero"
    """The field is left out when it would be 0."""
    NEVER = "never"


class Salting(StrEnum):
    """Where a cache salt separates tenants in an engine's cache."""

    ROOT = "root"
    """From the first block on."""
    TAIL = "tail"
    """From the first block on, or behind an approved beginning (``shared.sharedprefix``)."""
    NONE = "none"
    """Nowhere: it is not understood."""


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """Where an engine publishes its cache events; one address per data-parallel rank."""

    endpoints: tuple[str, ...]
    """ZMQ addresses of the PUB sockets, by rank."""
    replays: tuple[str, ...] = ()
    """Of the ROUTER sockets that repeat what was published; empty: there are none."""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Described:
    """What an engine says about itself; zeros and empty text where it says nothing."""

    version: str = ""
    block_size: int = 0
    blocks_total: int = 0
    max_model_len: int = 0
    prefix_cache: bool = True
    feed: FeedPlan | None = None
    """Only where the engine tells it; else the configuration has to."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at an engine's load."""

    load: WorkerLoad
    work: float | None = None
    """Tokens it has worked on since its start: falls only if it was started anew; 0 = it holds
    nothing. None: it does not say."""
    started: float | None = None
    """Its start, seconds since the epoch; None: it does not say."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks came to a tier. With ``tokens`` empty: blocks that are known already."""

    ids: tuple[int, ...]
    """The engine's own names of the blocks: opaque, folded into 64 bits."""
    parent: int | None
    """The block before the first; None: there is none."""
    tokens: Sequence[int]
    """Of all the blocks, ``block_size`` each."""
    block_size: int
    tier: Tier = Tier.GPU
    adapter: str | None = ""
    """Name of the LoRA adapter; empty: the model itself; None: it has one that is not named."""
    salt: str = ""
    """Only meant where the chain begins."""
    extras: tuple[bytes, ...] = ()
    """What besides tokens decides whether a block can be shared, per block; empty: nothing."""
    group: int | None = None
    kind: str | None = None
    """Kind of attention of the group."""
    repeats: bool = False
    """Blocks that are there already may be announced once more without a further copy."""


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of each block left a tier."""

    ids: tuple[int, ...]
    tier: Tier = Tier.GPU
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks are gone, from all tiers."""


EngineEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Frame:
    """One batch of an engine's events."""

    events: tuple[EngineEvent, ...]
    at: float = 0.0
    """The engine's clock."""
    rank: int | None = None
    malformed: int = 0
    """Events that could not be read; the others of the batch count."""
    unknown: int = 0
    """Events of kinds that are not known here."""


class MalformedFrame(ValueError):
    """A frame that is no batch of events; the message says why."""


class Engine(Protocol):
    """One make of engine. Stateless."""

    @property
    def name(self) -> str:
        """As in ``engine = "..."``."""
        ...

    @property
    def reports(self) -> Reports:
        """How it reports ``cached_tokens``."""
        ...

    @property
    def salting(self) -> Salting:
        """What it makes of ``cache_salt``."""
        ...

    @property
    def publishes(self) -> bool:
        """It can publish cache events over ZMQ."""
        ...

    @property
    def asks(self) -> tuple[str, ...]:
        """Paths that :meth:`describe` and :meth:`recognises` want to see."""
        ...

    @property
    def polls(self) -> tuple[str, ...]:
        """Paths that :meth:`read` wants to see."""
        ...

    def recognises(self, answers: Answers) -> bool:
        """These are answers of this engine."""
        ...

    def describe(self, answers: Answers, host: str) -> Described:
        """``host``: of the worker's URL, in place of wildcards in addresses."""
        ...

    def read(self, answers: Answers, block_size: int) -> Reading | None:
        """Load; None: the answers hold none. Counts in blocks are of ``block_size`` tokens."""
        ...

    def decode(self, payload: bytes) -> Frame:
        """An event frame. Raises :class:`MalformedFrame`; also where nothing is published."""
        ...

    def usage(self, answer: object) -> Usage | None:
        """Usage of a decoded answer or stream chunk; None: it carries none."""
        ...

    def edits(self, raw: bytes, *, recall: bool) -> list[Edit]:
        """Splices that a request body needs besides those for any OpenAI server.

        :param recall: the engine should announce again the blocks that the request reuses, since
            some were stored before anybody here listened.
        """
        ...
