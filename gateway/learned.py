"""What gateways tell each other about workers that publish no cache events.

Not the conclusions are shared but the facts: which prompt was served where, and what the worker
said about it. Each gateway feeds the others' facts to its own learner as if they were its own, so
that all count the same insertions, believe in the same capacity and agree on what is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Self

import msgspec

from gateway.learn import Served
from shared.blocks import pack_keys, unpack_keys
from shared.types import BlockKey, WorkerId

OUTBOX = 4096
"""Facts kept for the others at most; the oldest go first."""
KEYS_LIMIT = 4096
"""Keys told of one prompt at most: the first 64k tokens."""


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """A served prompt; without keys: the worker has restarted and holds nothing."""

    worker: str
    keys: bytes
    prompt_tokens: int = 0
    output_tokens: int = 0
    expected_tokens: int = 0
    cached_tokens: int | None = None
    judged: bool = False
    """What was delivered can be held against what was expected."""
    slack_tokens: int = 0

    @classmethod
    def of(cls, worker: WorkerId, served: Served) -> Self:
        """What to tell about a served prompt."""
        return cls(
            worker,
            pack_keys(list(served.keys[:KEYS_LIMIT])),
            served.prompt_tokens,
            served.output_tokens,
            served.expected_tokens,
            served.cached_tokens,
            served.clock is not None,
            served.slack_tokens,
        )

    @property
    def emptied(self) -> bool:
        """The worker has begun anew."""
        return not self.keys

    def served(self, clock: int | None = None) -> Served:
        """As the learner takes it; ``clock``: of the own learner."""
        return Served(
            [BlockKey(key) for key in unpack_keys(self.keys)],
            self.prompt_tokens,
            self.output_tokens,
            self.expected_tokens,
            self.cached_tokens,
            clock if self.judged else None,
            self.slack_tokens,
        )


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A fact with its teller and its number among all that he told about this worker."""

    gateway: str
    number: int
    fact: Fact


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Told)


def encode(told: Told) -> bytes:
    """As msgpack."""
    return _ENCODER.encode(told)


def decode(data: bytes) -> Told:
    """Inverse; raises ``msgspec.DecodeError``."""
    told = _DECODER.decode(data)
    if len(told.fact.keys) % 8:
        raise msgspec.DecodeError("keys have 8 bytes each")
    return told


class Outbox:
    """Facts on their way to the other gateways; nothing is kept while nobody takes them."""

    def __init__(self) -> None:
        self.open = False
        self._facts: deque[Fact] = deque(maxlen=OUTBOX)

    def put(self, fact: Fact) -> None:
        """One more, if somebody takes them."""
        if self.open:
            self._facts.append(fact)

    def take(self, limit: int) -> Iterator[Fact]:
        """Up to ``limit`` of them, oldest first; from now on they are kept."""
        self.open = True
        for _ in range(min(limit, len(self._facts))):
            yield self._facts.popleft()

    def drop(self) -> None:
        """They cannot be told now, and will be old news later."""
        self._facts.clear()
