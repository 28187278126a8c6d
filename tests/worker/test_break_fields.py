"""Numbers beyond all types in a worker's fields are refused by name, never a fault."""

from __future__ import annotations

import pytest

from shared.errors import BadRequest
from worker.fields import SHOWN_DIGITS, Fields

HUGE = 10**400


@pytest.mark.parametrize("value", [HUGE, -HUGE, float("nan"), float("inf"), 2, -1, True, "1", []])
def test_numbers(value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        Fields({"f": value}).number("f", 0, 1, 0.5)
    assert caught.value.param == "f"
    assert len(caught.value.message) < 80 + SHOWN_DIGITS


@pytest.mark.parametrize("value", [HUGE, -HUGE, float("nan"), float("inf"), 1.5, 9, -1, True, "1"])
def test_integers(value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        Fields({"f": value}).integer("f", 0, 8)
    assert caught.value.param == "f"
    assert len(caught.value.message) < 80 + SHOWN_DIGITS


@pytest.mark.parametrize("value", [HUGE, -1, 100, 1.0, True, None, "1"])
def test_token_ids_and_biases(value: object) -> None:
    with pytest.raises(BadRequest):
        Fields({"f": [value]}).token_ids("f", 100)
    if value not in (-1, 100, 1.0) or value is True:
        with pytest.raises(BadRequest):
            Fields({"f": {"1": value}}).biases("f", 100)
    with pytest.raises(BadRequest):
        Fields({"f": {str(value): 1}}).biases("f", 1)
