"""Those who look at something again and again wake the process at moments that they share."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.ticks import until_next

PERIODS = st.sampled_from([0.25, 0.5, 1.0])


@given(period=PERIODS, now=st.floats(0, 1e7))
def test_a_moment_is_a_multiple_of_the_period_and_not_this_one(period: float, now: float) -> None:
    rest = until_next(period, now)
    assert 0.25 * period < rest <= 1.25 * period
    at = (now + rest) / period
    assert math.isclose(at, round(at), rel_tol=0, abs_tol=1e-6)


@given(now=st.floats(0, 1e7))
def test_a_timer_that_fires_a_little_early_is_no_moment_of_its_own(now: float) -> None:
    at = now + until_next(0.25, now)
    early = at - 0.001
    assert early + until_next(0.25, early) > at + 0.2


@given(now=st.floats(0, 1e7))
def test_a_longer_period_has_no_moments_of_its_own(now: float) -> None:
    at = (now + until_next(0.5, now)) / 0.25
    assert math.isclose(at, round(at), rel_tol=0, abs_tol=1e-6)
