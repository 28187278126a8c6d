"""The one fact that every attempt leaves, live, simulated or replayed.

The token sums close without a residual, for one record and so for any group of them:

    prompt    = tail + cold + evicted + available
    available = captured + diverted_for_load + draining + policy + isolation
    delivered = captured - stale_index - token_mismatch - unreported + gained

Only a request's final attempt carries prompt tokens; earlier attempts have zeros there.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How an attempt ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """The worker refused the request itself (4xx)."""
    UPSTREAM_ERROR = "upstream_error"
    """The worker failed: 5xx, broken stream, refused connection, time-out."""
    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"
    REJECTED = "rejected"
    """No attempt was made: no worker, no capacity."""


OK, REJECTED = Outcome.OK, Outcome.REJECTED
"""For what every request passes: looking a member up in its class takes as long as a call."""


class TokenFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt tokens of one request went; see the module's equations. All >= 0."""

    prompt: int = 0
    tail: int = 0
    """Can never match: the partial last block and the last token."""
    cold: int = 0
    """Never seen before."""
    evicted: int = 0
    """Seen before, on no live worker now."""
    available: int = 0
    """Best overlap on any live worker at the decision."""
    captured: int = 0
    """Overlap on the chosen worker."""
    diverted_for_load: int = 0
    draining: int = 0
    policy: int = 0
    isolation: int = 0
    delivered: int = 0
    """The engine's own ``cached_tokens``."""
    stale_index: int = 0
    token_mismatch: int = 0
    unreported: int = 0
    gained: int = 0

    def check(self) -> None:
        """Raise ``ValueError`` if a sum does not close or a term is negative."""
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is negative in {self}")
        if self.prompt != self.tail + self.cold + self.evicted + self.available:
            raise ValueError(f"prompt does not close in {self}")
        spread = self.diverted_for_load + self.draining + self.policy + self.isolation
        if self.available != self.captured + spread:
            raise ValueError(f"available does not close in {self}")
        lost = self.stale_index + self.token_mismatch + self.unreported
        if self.delivered != self.captured - lost + self.gained:
            raise ValueError(f"delivered does not close in {self}")


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker was chosen, in numbers (``gateway.reasons`` makes words of them)."""

    code: str
    """One of ``gateway.reasons.CODES``."""
    term: str = ""
    """Term of the cost that spoke most against ``other``; empty if the policy has no terms."""
    other: str = ""
    """The worker to compare with: the one that held more, else the second choice."""
    other_matched: int = 0
    gap: float = 0.0
    """How much dearer ``other`` was: seconds for the policy ``cost``, else its own units."""


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """What another policy would have chosen at the same moment, with the caches as they were."""

    matched_tokens: int
    ttft_s: float
    """Predicted, from arrival to first content."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Times are wall-clock seconds (``at``) or durations in seconds."""

    at: float
    """When the request arrived, seconds since the epoch."""
    request_id: str
    attempt: int
    """1, 2, ...; 0 for a rejection without an attempt."""
    final: bool
    route: str
    model: str
    tenant: str = ""
    family: str = ""
    """Short hex of the prompt's first index key: requests that share a beginning share it."""
    path: tuple[int, ...] = ()
    """Index keys after 128, 256, 512, ... tokens: where families branch. Low 32 bits each."""
    policy: str = ""
    worker: str = ""
    trust: str = ""
    outcome: Outcome = Outcome.OK
    status: int = 200
    flow: TokenFlow = TokenFlow()
    output_tokens: int = 0
    decided_s: float = 0.0
    """Arrival to decision."""
    ttft_s: float | None = None
    """Arrival to first content; None if there was none."""
    total_s: float = 0.0
    itl_s: float | None = None
    """Mean time between content events."""
    predicted_ttft_s: float | None = None
    reported: bool = False
    """The engine told ``cached_tokens``."""
    prompt_tokens: int = 0
    """As counted before the attempt, whatever its end; 0 = not counted."""
    matched_tokens: int = 0
    """What the chosen worker was believed to hold of them."""
    client_id: str = ""
    """The client's own ``x-request-id``, if it sent a short and plain one."""
    why: Why | None = None
    round_robin: Shadow | None = None
