"""What was predicted of a prompt, and what the worker said it had: values that can be compared."""

from __future__ import annotations

import msgspec

from gateway.routing.base import Query, key_tokens
from shared.blocks import GRANULE
from shared.openai import Usage
from shared.types import WorkerId


class Expectation(msgspec.Struct, frozen=True):
    """What was predicted of a prompt on the worker it was sent to. In tokens of its keys."""

    place: WorkerId | None
    """Where in the index what it leaves is learned; None: the worker's events tell."""
    least: int
    """Usable from the index."""
    most: int
    """With what siblings under way may add."""
    other: int | None
    """What the predictor that is not believed now would have said."""
    clock: int | None
    """Of the learner, then."""
    told: int | None
    """What the worker's events said, be it ``least`` or ``other``; None: they say nothing of it."""
    decided: float
    """Monotonic seconds."""
    version: int
    """Of what was known of the worker then (:meth:`gateway.trust.TrustBook.version`)."""
    stride: int
    """Granules per key of the worker."""


class Delivered(msgspec.Struct, frozen=True):
    """What an answer's usage said, in tokens of the prompt's keys."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None: it said nothing of the cache."""
    text: bool
    """A key is a piece of text, so a difference of a few tokens is none."""

    @classmethod
    def of(cls, query: Query, usage: Usage | None, output: int, *, reports: bool) -> Delivered:
        """:param reports: the worker is known to report, so that an absent figure means 0."""
        cached = None if usage is None else usage.cached
        if usage is not None and cached is None and reports:
            cached = 0
        if query.prompt_tokens or usage is None or usage.prompt <= 0:
            return cls(query.prompt_tokens, output, cached, not query.prompt_tokens)
        prompt = text_tokens(query)
        scale = prompt / usage.prompt
        if cached:
            cached = round(cached * scale)
        return cls(prompt, round(output * scale), cached, True)


def text_tokens(query: Query) -> int:
    """Length of what is known as text only, in tokens of its keys; half of a prompt's last piece is
    there on average."""
    return key_tokens(query) + GRANULE // 2 * (len(query.prompts) or 1)
