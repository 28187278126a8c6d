"""Why a worker was chosen: a short code with the numbers behind it, and the same in words.

The numbers fit a ledger line; :func:`in_words` makes a sentence of them, there and then or days
later. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import sub

from gateway.decision import Route
from gateway.records import RequestRecord, Why
from gateway.routing.base import Scored

ONLY, HOLDER, EQUAL, CHEAPER, COPY, NO_OVERLAP, POLICY, REJECTED = (
    "only",
    "holder",
    "equal",
    "cheaper",
    "copy",
    "no_overlap",
    "policy",
    "rejected",
)
CODES = {
    ONLY: "it was the only worker that could take the request",
    HOLDER: "it held more of the prompt than any other, and was the cheapest in all",
    EQUAL: "several workers held equally much; it was the cheapest of them",
    CHEAPER: "another worker held more of the prompt, but was dearer in all",
    COPY: "another worker held more, but its beginning is popular: one more copy pays for itself",
    NO_OVERLAP: "no worker held any of the prompt: the cheapest one by load",
    POLICY: "a policy that does not weigh cost against overlap chose it",
    REJECTED: "no worker was tried",
}
"""Every reason code, and what it says of the chosen worker."""

TERMS = {
    "wait": "work waiting there",
    "own": "what it would have had to compute",
    "others": "what that computing takes from the pool",
    "behind": "those who would have waited behind it",
    "home": "the usual wait there",
    "memory": "waiting for KV memory",
    "decode": "sequences decoding there",
    "place": "waiting for a place among those it serves at a time",
    "failure": "the chance that it fails",
    "fresh": "that it had only just joined",
    "explore": "another look at what the chosen one holds",
}
"""Terms of the cost in words; a term without an entry is called by its name."""


def why(route: Route) -> Why:
    """The reason for ``route``'s choice, with the worker it was most worth comparing with."""
    order = route.order
    chosen = order[0]
    matched = chosen.candidate.matched_tokens
    if len(order) == 1:
        return Why(code=ONLY)
    holder, best = chosen, matched
    for scored in order:
        held = scored.candidate.matched_tokens
        if held > best:
            holder, best = scored, held
    code, other = _judge(route.policy, matched, best, holder, order)
    term = ""
    if chosen.parts and other.parts:
        term = _heaviest(other.parts, chosen.parts)
    return Why(
        code=code,
        term=term,
        other=other.candidate.worker.id,
        other_matched=other.candidate.matched_tokens,
        gap=other.cost - chosen.cost,
    )


def _heaviest(parts: Mapping[str, float], less: Mapping[str, float]) -> str:
    """The first of those terms that exceed their counterparts by most."""
    names = tuple(parts)
    if names == tuple(less):  # as nearly always
        overs = list(map(sub, parts.values(), less.values()))
        return names[overs.index(max(overs))]
    found, most = "", -inf
    for name, value in parts.items():
        over = value - less[name] if name in less else value
        if over > most:
            found, most = name, over
    return found


def _pays_back(chosen: Scored, holder: Scored) -> bool:
    """Only the discount on computing a popular beginning once more made the difference."""
    candidate = chosen.candidate
    spared_s = candidate.shared_tokens * candidate.worker.prefill_s_per_token
    return spared_s > holder.cost - chosen.cost


def _judge(
    policy: str, matched: int, best: int, holder: Scored, order: Sequence[Scored]
) -> tuple[str, Scored]:
    """The code, and the worker to compare with: the best holder if it was passed over."""
    if policy != "cost":
        return POLICY, holder if best > matched else order[1]
    if not best:
        return NO_OVERLAP, order[1]
    if best > matched:
        return (COPY if _pays_back(order[0], holder) else CHEAPER), holder
    return (EQUAL if order[1].candidate.matched_tokens == best else HOLDER), order[1]


def in_words(reason: Why | None, *, worker: str, policy: str, matched: int, prompt: int) -> str:
    """One sentence about a choice; empty where nothing was recorded.

    :param matched: tokens of the prompt that ``worker`` was believed to hold.
    :param prompt: its length in tokens; 0 = not counted.
    """
    if reason is None:
        return ""
    if reason.code == REJECTED:
        return "no worker was tried: none could take the request"
    held = f"{worker} held {matched:,} of {prompt:,} tokens" if prompt else f"{worker} was chosen"
    if reason.code == ONLY:
        return f"{worker} was the only worker that could take it"
    other = f"{reason.other} ({reason.other_matched:,} tokens)" if prompt else reason.other
    if reason.code == POLICY:
        return f"{held}: policy {policy} chose it; the best other choice was {other}"
    if reason.code == COPY:
        more = f"{reason.other} held {reason.other_matched:,}"
        return f"{held}; {more}, but that beginning is popular: one more copy pays off"
    cause = TERMS.get(reason.term, reason.term)
    dearer = f"{_seconds(reason.gap)} dearer" if reason.gap >= 1e-6 else "no cheaper"
    behind = f"{other} was {dearer}" + (f", most of it {cause}" if cause and reason.gap else "")
    lead = {
        HOLDER: f"{held}, more than any other",
        EQUAL: f"{held}, as others did, and was the cheapest of them",
        CHEAPER: f"{held}: another held more, but was not worth it",
        NO_OVERLAP: f"no worker held any of it; {worker} was the cheapest by load",
    }.get(reason.code, held)
    return f"{lead}; {behind}"


def words_of(record: RequestRecord) -> str:
    """:func:`in_words` for a record."""
    return in_words(
        record.why,
        worker=record.worker,
        policy=record.policy,
        matched=record.matched_tokens,
        prompt=record.prompt_tokens,
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
