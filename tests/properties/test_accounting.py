"""The token equations close whatever comes in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.accounting import account, matchable_tokens
from gateway.decision import Overlap

TOKENS = st.integers(-5, 500)
MAYBE = st.none() | TOKENS
POLICIES = st.sampled_from(["cost", "random", "longest_prefix"])


@given(
    overlap=st.builds(
        Overlap,
        matchable_tokens=TOKENS,
        block_size=st.integers(1, 64),
        seen_tokens=TOKENS,
        available_tokens=TOKENS,
        draining_tokens=TOKENS,
        isolated_tokens=TOKENS,
    ),
    prompt=TOKENS,
    captured=TOKENS,
    policy=POLICIES,
    usage_prompt=MAYBE,
    usage_cached=MAYBE,
)
def test_flow_closes_for_any_input(
    overlap: Overlap,
    prompt: int,
    captured: int,
    policy: str,
    usage_prompt: int | None,
    usage_cached: int | None,
) -> None:
    flow = account(
        overlap,
        prompt_tokens=prompt,
        captured_tokens=captured,
        policy=policy,
        usage_prompt=usage_prompt,
        usage_cached=usage_cached,
    )
    flow.check()
    assert flow.isolation <= max(0, overlap.isolated_tokens)
    if overlap.isolated_tokens <= 0:
        assert flow.isolation == 0
    if usage_cached is not None:
        assert flow.delivered == max(0, usage_cached)
        assert flow.unreported == 0
    else:
        assert flow.unreported == flow.captured


@given(st.integers(0, 2000), st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_matchable_leaves_at_least_the_last_token(prompt: int, sizes: list[int]) -> None:
    tokens, size = matchable_tokens(prompt, sizes)
    assert size in sizes
    assert 0 <= tokens <= max(0, prompt - 1)
    assert tokens % size == 0
