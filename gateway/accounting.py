"""Where the prompt tokens of a request went: closes the equations of :mod:`gateway.records`.

How the split is chosen:
- ``tail``: what no live worker of the model could reuse however warm it is (the partial last block
  and the last token; with several block sizes, of the worker that can reuse most).
- ``available`` counts ready, draining and ejected holders; a worker that is down is not live.
- ``draining``: the part that only draining or ejected workers held. The rest of what was available
  but not captured is ``policy`` when another policy than ``cost`` chose, else
  ``diverted_for_load``. What a worker excluded by a retry held is not told apart from load.
- ``isolation``: what a live worker held beyond that of the same tokens under another cache salt.
- ``delivered`` is what the engine said. If it said nothing, all that was captured is
  ``unreported``. If it delivered less, that is ``token_mismatch`` where it also counted another
  prompt length than we did, else ``stale_index``; if it delivered more, that is ``gained``.
- A list of prompts goes to one worker as one request. Each prompt is available where most of it is,
  so what the chosen worker lacks of some is lost as above. What prompts of one list reuse of each
  other nobody held at the decision: it is ``gained``.
- Without a tokenizer the prompt's length is the engine's, and the overlap, which is known in pieces
  of text, is given in the engine's tokens too (:mod:`gateway.lease`).
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.decision import Overlap
from gateway.records import TokenFlow
from shared.blocks import usable_tokens


def matchable_tokens(prompt_tokens: int, block_sizes: Iterable[int]) -> tuple[int, int]:
    """Prompt tokens that could be reused at best, and with which of the (one or more) sizes."""
    sizes = set(block_sizes)
    if len(sizes) == 1:
        [size] = sizes
        # As `usable_tokens`: whole blocks, and never the last token.
        return ((prompt_tokens - 1) // size * size if prompt_tokens > 0 else 0), size
    return max(
        ((usable_tokens(prompt_tokens, prompt_tokens, size), size) for size in sizes),
        key=lambda found: (found[0], -found[1]),
    )


def account(
    overlap: Overlap,
    *,
    prompt_tokens: int,
    captured_tokens: int,
    policy: str,
    usage_prompt: int | None,
    usage_cached: int | None,
) -> TokenFlow:
    """The flow of one request that was sent to a worker; closes for any arguments.

    :param prompt_tokens: as counted here; 0 = not counted.
    :param captured_tokens: usable overlap expected on the chosen worker.
    :param usage_prompt: prompt tokens as the engine counted them; None = it did not say.
    :param usage_cached: the engine's ``cached_tokens``; None = it did not say, which is not 0.
    """
    prompt = prompt_tokens or usage_prompt or 0
    prompt = prompt if prompt > 0 else 0
    matchable = overlap.matchable_tokens
    if prompt != prompt_tokens:
        matchable = usable_tokens(prompt, prompt, overlap.block_size)
    # Comparisons, not min and max: this is a part of every request.
    matchable = prompt if matchable > prompt else matchable if matchable > 0 else 0
    reachable = overlap.available_tokens
    reachable = matchable if reachable > matchable else reachable if reachable > 0 else 0
    isolation = overlap.isolated_tokens
    if isolation:
        isolation = min(max(0, isolation), matchable - reachable)
    available = reachable + isolation
    captured = captured_tokens if captured_tokens > 0 else 0
    captured = reachable if captured > reachable else captured
    seen = overlap.seen_tokens
    evicted = (matchable if seen > matchable else seen) - available
    evicted = evicted if evicted > 0 else 0
    missed = reachable - captured
    draining = overlap.draining_tokens
    if draining:
        draining = min(max(0, draining), missed)
    elsewhere = missed - draining
    lost = gained = delivered = unreported = 0
    if usage_cached is None:
        unreported = captured
    else:
        delivered = usage_cached if usage_cached > 0 else 0
        if delivered < captured:
            lost = captured - delivered
        else:
            gained = delivered - captured
    mismatch = usage_prompt is not None and prompt_tokens > 0 and usage_prompt != prompt_tokens
    return TokenFlow(
        prompt=prompt,
        tail=prompt - matchable,
        cold=matchable - available - evicted,
        evicted=evicted,
        available=available,
        captured=captured,
        draining=draining,
        policy=elsewhere if policy != "cost" else 0,
        diverted_for_load=elsewhere if policy == "cost" else 0,
        isolation=isolation,
        delivered=delivered,
        stale_index=0 if mismatch else lost,
        token_mismatch=lost if mismatch else 0,
        unreported=unreported,
        gained=gained,
    )
