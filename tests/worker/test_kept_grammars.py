"""Compiled grammars are kept by salt, and nobody's are pushed out by another's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.guide import Grammar
from worker.keptgrammars import MOST, MOST_OF_ONE, KeptGrammars


class Compiled(Grammar):
    def start(self):
        raise NotImplementedError


def fill(kept: KeptGrammars, salt: str, count: int) -> None:
    for number in range(count):
        kept.keep(salt, ("json", str(number)), Compiled())


def held(kept: KeptGrammars, salt: str, count: int) -> list[int]:
    return [n for n in range(count) if kept.find(salt, ("json", str(n))) is not None]


def test_the_latest_used_of_one_salt_are_kept() -> None:
    kept = KeptGrammars()
    fill(kept, "a", MOST_OF_ONE)
    assert kept.find("a", ("json", "0")) is not None
    kept.keep("a", ("json", "new"), Compiled())
    assert kept.find("a", ("json", "1")) is None
    assert kept.find("a", ("json", "0")) is not None
    assert len(kept) == MOST_OF_ONE


def test_a_flood_of_one_salt_takes_nothing_from_another() -> None:
    kept = KeptGrammars()
    fill(kept, "victim", MOST_OF_ONE)
    fill(kept, "flood", 1000)
    assert held(kept, "victim", MOST_OF_ONE) == list(range(MOST_OF_ONE))


def test_of_very_many_salts_nobody_loses_an_equal_share() -> None:
    kept, salts = KeptGrammars(), 32
    fill(kept, "small", MOST // salts)
    for number in range(salts - 1):
        fill(kept, f"salt {number}", MOST_OF_ONE)
    assert held(kept, "small", MOST // salts) == list(range(MOST // salts))
    assert len(kept) == MOST


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 99)), max_size=600))
def test_limits_hold_and_the_newest_is_there(steps: list[tuple[str, int]]) -> None:
    kept = KeptGrammars()
    for salt, number in steps:
        kept.keep(salt, ("json", str(number)), Compiled())
        assert kept.find(salt, ("json", str(number))) is not None
        assert len(kept) <= MOST
    assert sum(len(held(kept, salt, 100)) for salt in "abcdefgh") == len(kept)
