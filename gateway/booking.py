"""What one attempt adds to a worker's load, and what the worker's own reports add to that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from shared.load import WorkerLoad


class Speaker(Protocol):
    """An answer that comes in pieces."""

    last_at: float
    """When its latest content came, in monotonic seconds."""


class Booking(msgspec.Struct, eq=False):
    """The share of one attempt in a worker's load."""

    prefill_s: float
    kv_tokens: int
    begun: float
    wait_s: float
    """Predicted wait behind others when it began."""
    expected_s: float
    """How long the whole attempt was expected to take."""
    bound: float = 0.0
    """Share of the prompt that it finds on this worker and on no other, 0..1."""
    probe: bool = False
    beside: int = 0
    """Requests that were there when it began."""
    prefilled: float = 0.0
    """When its first token came, or it ended without one; 0 = not yet."""
    ended: float | None = None
    speaker: Speaker | None = None
    """Tells whether the answer goes on, once it has begun; None: nobody knows."""


@dataclass(slots=True)
class Reported:
    """A load report, and what of it this gateway had not booked. Others may have: what they tell,
    sooner or later, is the same work (:func:`gateway.views.look`)."""

    load: WorkerLoad
    at: float
    """When it came."""
    made: float
    """When it was made, as far as that is known."""
    unbooked_s: float
    """Prefill work beyond our own."""
    foreign: int
    """Requests beyond our own."""

    def unbooked_prefill_s(self, now: float) -> float:
        """What is left of it: it gets done as time passes."""
        return max(0.0, self.unbooked_s - (now - self.made)) if self.unbooked_s else 0.0
