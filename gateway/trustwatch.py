"""Whether one worker deserves the trust that its feed allows: predicted against delivered.

A sustained difference lowers exact to learned, and learned to blind when next to nothing of what
was expected comes. The predictor that is not used meanwhile is compared too: once it would have
been right, trust rises again, each time a little later, so that a worker on the edge does not flap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from gateway.routing.base import Trust

MUTE_AFTER = 16
"""Answers without ``cached_tokens``, though a match was expected, until a worker counts as mute."""
WINDOW = 32
"""Comparisons that a judgement rests on, at most."""
ENOUGH = 16
"""... and at least."""
WRONG = 0.3
"""Exact is lost when this share of the tokens, predicted or delivered, was predicted wrongly."""
RIGHT = 0.1
"""It comes back when the share that the events alone would have got wrong is below this."""
NOTHING, SOMETHING = 0.1, 0.3
"""Learned is lost when less of what was expected comes, and returns when more does."""
FIRST_REST_S, LONGEST_REST_S = 15.0, 600.0
"""How long trust stays lowered at least; doubled each time, until it has held for as long."""
RANK = {Trust.BLIND: 0, Trust.LEARNED: 1, Trust.EXACT: 2}


class Compared(msgspec.Struct, frozen=True):
    """One answered request: what was predicted, and what was delivered. In tokens.

    What siblings under way may add makes a prediction a range.
    """

    least: int
    most: int
    other: int | None
    """What the predictor that is not used now would have said."""
    delivered: int
    block: int
    """Differences below one block are none."""

    @property
    def telling(self) -> bool:
        """Whether there was anything to predict."""
        return max(self.most, self.other or 0, self.delivered) >= self.block

    def error(self) -> int:
        """Tokens between the prediction and the truth."""
        return self._beyond_block(max(self.least - self.delivered, self.delivered - self.most, 0))

    def other_error(self) -> int:
        """The same for the other predictor."""
        return self._beyond_block(abs((self.other or 0) - self.delivered))

    def _beyond_block(self, tokens: int) -> int:
        return tokens if tokens >= self.block else 0


class Window:
    """Sums over the last comparisons."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int]] = deque()
        self._part = self._whole = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, part: int, whole: int) -> None:
        """One comparison."""
        self._rows.append((part, whole))
        self._part += part
        self._whole += whole
        if len(self._rows) > WINDOW:
            part, whole = self._rows.popleft()
            self._part -= part
            self._whole -= whole

    @property
    def share(self) -> float:
        """Sum of the parts over that of the wholes."""
        return self._part / self._whole if self._whole else 0.0

    def clear(self) -> None:
        """What was compared so far does not count."""
        self._rows.clear()
        self._part = self._whole = 0


@dataclass(slots=True)
class Watch:
    """What is known about one worker's trustworthiness."""

    state: Trust
    reason: str
    told: Trust
    told_reason: str
    cacheless: bool
    limits: dict[str, tuple[Trust, str]] = field(default_factory=dict)
    reported: bool = False
    unreported: int = 0
    errors: Window = field(default_factory=Window)
    arrivals: Window = field(default_factory=Window)
    """Delivered of expected, in use."""
    others: Window = field(default_factory=Window)
    lowered: tuple[Trust, str] | None = None
    """The limit that its own answers set."""
    lowered_at: float = 0.0
    raised_at: float = 0.0
    rest_s: float = FIRST_REST_S
    rebuilt: bool = False
    """What it is believed from was had anew since trust was lowered: no rest is needed."""
    version: int = 0
    """Counts the circumstances: what was decided under others is not compared."""

    @property
    def mute(self) -> bool:
        return not self.reported and self.unreported >= MUTE_AFTER

    def now_is(self) -> tuple[Trust, str]:
        """The lowest of all that is said."""
        said = [(self.told, self.told_reason), *self.limits.values()]
        if self.cacheless:
            said.append((Trust.BLIND, "no prefix cache"))
        if self.lowered is not None:
            said.append(self.lowered)
        state, reason = min(said, key=lambda one: RANK[one[0]])
        if state is not Trust.BLIND and self.mute:
            if state is Trust.LEARNED:
                return Trust.BLIND, "it never reports cached_tokens"
            return state, f"{reason}; it never reports cached_tokens, so nothing can be compared"
        return state, reason

    def compare(self, seen: Compared, now: float) -> None:
        """Take one comparison in."""
        if not seen.telling:
            return
        if whole := max(seen.most, seen.delivered):
            self.errors.add(seen.error(), whole)
        if seen.least >= seen.block:
            self.arrivals.add(min(seen.least, seen.delivered), seen.least)
        if seen.other is not None:
            self._compare_other(seen, seen.other)
        if self.lowered is None:
            self._lower(now)
        else:
            self._raise(now)

    def _compare_other(self, seen: Compared, other: int) -> None:
        if self.state is not Trust.BLIND:
            self.others.add(seen.other_error(), max(other, seen.delivered))
        elif other >= seen.block:
            self.others.add(min(other, seen.delivered), other)

    def _lower(self, now: float) -> None:
        if self.state is Trust.EXACT and len(self.errors) >= ENOUGH and self.errors.share > WRONG:
            share = self.errors.share
            self._limit(Trust.LEARNED, f"{share:.0%} of its tokens were predicted wrongly", now)
        elif (
            self.state is Trust.LEARNED
            and len(self.arrivals) >= ENOUGH
            and self.arrivals.share < NOTHING
        ):
            share = self.arrivals.share
            self._limit(Trust.BLIND, f"it delivered {share:.0%} of what it should hold", now)

    def _limit(self, trust: Trust, reason: str, now: float) -> None:
        held_s = now - self.raised_at
        self.rest_s = (
            min(2 * self.rest_s, LONGEST_REST_S)
            if self.raised_at and held_s < self.rest_s
            else FIRST_REST_S
        )
        self.lowered, self.lowered_at, self.rebuilt = (trust, reason), now, False
        self.clear()

    def _raise(self, now: float) -> None:
        rested = self.rebuilt or now - self.lowered_at >= self.rest_s
        if not rested or len(self.others) < ENOUGH:
            return
        share = self.others.share
        blind = self.lowered is not None and self.lowered[0] is Trust.BLIND
        if (share > SOMETHING) if blind else (share < RIGHT):
            self.lowered, self.raised_at = None, now
            self.clear()

    def clear(self) -> None:
        """What was compared under other circumstances does not count."""
        self.version += 1
        for window in (self.errors, self.arrivals, self.others):
            window.clear()
