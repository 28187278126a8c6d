"""Several lists that name the same workers: who stays, who leaves, who drains."""

from __future__ import annotations

from itertools import permutations

import pytest

from gateway.discovery.base import Listing, Source
from gateway.feeds.claims import Claims
from gateway.feeds.members import Adoption, Member, Members
from shared.load import WorkerInfo

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Kit:
    """Members with their claims; ``read`` does what the tender does."""

    def __init__(self) -> None:
        self.members = Members()
        self.claims = Claims(self.members)

    def read(self, source: Source, *urls: str, **drains: str) -> list[str]:
        """Take a listing in; returns who left."""
        listing = Listing({url: drains.get(url[7], "") for url in urls})
        changes = self.claims.take(source, listing)
        for url in changes.add:
            self.members.add(url, source)
        for member in changes.leave:
            self.remove(member)
        return [member.url for member in changes.leave]

    def remove(self, member: Member, *, by_hand: bool = False) -> None:
        if by_hand:
            self.claims.dismiss(member)
        self.claims.forget(member)
        self.members.remove(member)

    def answer(self, url: str, name: str, epoch: int = 1) -> Adoption:
        member = self.members.at(url)
        assert member is not None
        info = WorkerInfo(name, epoch, url, ("m",))
        adoption = self.members.adopt(member, info)
        if adoption is Adoption.ALIAS:
            known = self.members.worker(info.id)
            assert known is not None
            self.claims.alias(url, known)
        else:
            member.healthy = True
        return adoption

    @property
    def urls(self) -> set[str]:
        return {member.url for member in self.members}

    @property
    def drains(self) -> dict[str, str]:
        return {member.url: why for member, why in self.claims.drains().items()}


def test_a_list_adds_and_lets_go() -> None:
    kit = Kit()
    assert kit.read(Source.DNS, A, B) == []
    assert kit.urls == {A, B}
    assert kit.read(Source.DNS, B, C) == [A]
    assert kit.urls == {B, C}


@pytest.mark.parametrize("order", list(permutations((Source.STATIC, Source.DNS, Source.FILE))))
def test_a_worker_stays_until_the_last_list_lets_go(order: tuple[Source, ...]) -> None:
    kit = Kit()
    for source in order:
        kit.read(source, A)
    for source in order[:-1]:
        assert kit.read(source) == []
        assert kit.urls == {A}
    assert kit.read(order[-1]) == [A]


@pytest.mark.parametrize("by", [Source.REDIS, Source.ADMIN])
def test_one_that_registered_or_was_added_by_hand_stays(by: Source) -> None:
    kit = Kit()
    kit.read(Source.KUBERNETES, A)
    kit.members.add(A, by)
    assert kit.read(Source.KUBERNETES) == []
    assert kit.urls == {A}


def test_two_addresses_of_one_worker_are_one_worker_for_all_lists() -> None:
    kit = Kit()
    kit.read(Source.STATIC, A)
    kit.read(Source.DNS, B)
    assert kit.answer(A, "w") is Adoption.JOINED
    assert kit.answer(B, "w") is Adoption.ALIAS
    assert kit.urls == {A}
    assert kit.read(Source.DNS, B) == []  # read again: not probed as a stranger again
    assert kit.urls == {A}
    assert kit.read(Source.STATIC) == []  # DNS names it still, under its other address
    assert kit.urls == {A}
    assert kit.read(Source.DNS) == [A]


def test_two_addresses_in_one_list_count_once() -> None:
    kit = Kit()
    kit.read(Source.DNS, A, B)
    kit.answer(A, "w")
    kit.answer(B, "w")
    assert kit.read(Source.DNS, B) == []
    assert kit.read(Source.DNS) == [A]


def test_an_alias_is_asked_itself_when_the_other_address_went_silent() -> None:
    kit = Kit()
    kit.read(Source.DNS, A, B)
    kit.answer(A, "w")
    kit.answer(B, "w")
    member = kit.members.at(A)
    assert member is not None
    member.healthy = False
    kit.read(Source.DNS, A, B)
    assert kit.urls == {A, B}
    assert kit.answer(B, "w", epoch=2) is Adoption.RESTARTED
    assert kit.urls == {B}


def test_any_list_can_drain_a_worker_under_any_of_its_addresses() -> None:
    kit = Kit()
    kit.read(Source.STATIC, A)
    kit.read(Source.KUBERNETES, B, b="terminating")
    assert kit.drains == {B: "terminating"}
    kit.answer(A, "w")
    kit.answer(B, "w")
    assert kit.drains == {A: "terminating"}
    kit.read(Source.KUBERNETES, B)
    assert kit.drains == {}


def test_one_removed_by_hand_stays_out_while_the_list_names_it() -> None:
    kit = Kit()
    kit.read(Source.DNS, A, B)
    kit.answer(A, "w")
    kit.answer(B, "w")
    member = kit.members.at(A)
    assert member is not None
    kit.remove(member, by_hand=True)
    kit.read(Source.DNS, A, B)
    assert kit.urls == set()
    kit.read(Source.DNS, B)
    kit.read(Source.DNS, A, B)  # the list had let go of A, and names it anew
    assert kit.urls == {A}
    kit.claims.welcome(B)  # added by hand
    kit.read(Source.DNS, A, B)
    assert kit.urls == {A, B}
