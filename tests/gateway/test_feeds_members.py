"""Who is a worker, and when one is gone."""

from __future__ import annotations

import pytest

from gateway.config import WorkersConfig
from gateway.discovery.base import Look, Sighting, Source, worker_url
from gateway.discovery.static import static_urls
from gateway.feeds.members import LEASE_S, Adoption, Member, Members
from gateway.feeds.registered import Registered
from gateway.index.stats import FeedStats
from shared.errors import ConfigError
from shared.load import WorkerInfo, WorkerLoad

A, B = "http://a:1", "http://b:1"


def info(name: str = "w", epoch: int = 1, url: str = "http://said:9", **more) -> WorkerInfo:
    return WorkerInfo(name, epoch, url, ("m",), **more)


def look(*infos: WorkerInfo, listed: tuple[str, ...] = ()) -> Look:
    sightings = {i.id: Sighting(i, i.epoch, 0, None) for i in infos}
    return Look(sightings, frozenset(listed) | sightings.keys())


def test_a_worker_is_reached_where_it_was_found() -> None:
    members = Members()
    member = members.add(A, Source.STATIC)
    assert members.adopt(member, info()) is Adoption.JOINED
    assert member.info.url == A
    assert members.adopt(member, info()) is Adoption.SAME
    assert members.adopt(member, info(blocks_total=5)) is Adoption.UPDATED
    assert members.adopt(member, info(epoch=2)) is Adoption.RESTARTED


def test_one_worker_with_two_addresses_is_one() -> None:
    members = Members()
    first, second = members.add(A, Source.STATIC), members.add(B, Source.REDIS)
    members.adopt(first, info())
    assert members.adopt(second, info()) is Adoption.ALIAS
    assert [m.url for m in members] == [A]
    assert first.sources == {Source.STATIC, Source.REDIS}


def test_an_address_that_never_answered_is_dropped_when_its_worker_is_found() -> None:
    members = Members()
    members.add("http://0.0.0.0:1", Source.REDIS, claimed="w")
    found = members.add(A, Source.STATIC)
    members.adopt(found, info())
    assert [m.url for m in members] == [A]
    assert found.sources == {Source.STATIC, Source.REDIS}


def test_two_live_workers_with_one_name_are_a_conflict() -> None:
    members = Members()
    first, second = members.add(A, Source.STATIC), members.add(B, Source.STATIC)
    members.adopt(first, info())
    first.healthy = True
    assert members.adopt(second, info(epoch=2)) is Adoption.CONFLICT
    assert members.worker("w") is first
    assert "another worker is named w" in second.reason
    assert first.ask_again, "it may be the same process by now"


def test_a_name_moves_from_a_dead_address_to_a_live_one() -> None:
    members = Members()
    first, second = members.add(A, Source.REDIS), members.add(B, Source.REDIS)
    members.adopt(first, info())
    first.healthy = False
    assert members.adopt(second, info(epoch=2)) is Adoption.RESTARTED
    assert members.worker("w") is second
    assert [m.url for m in members] == [B]


def test_another_worker_at_an_address_frees_the_old_name() -> None:
    members = Members()
    member = members.add(A, Source.STATIC)
    members.adopt(member, info("old"))
    assert members.adopt(member, info("new")) is Adoption.JOINED
    assert members.worker("old") is None
    assert members.worker("new") is member


class Leased:
    """One worker that registered itself; time is set by hand."""

    def __init__(self, *sources: Source) -> None:
        self.members = Members()
        self.member = self.members.add(A, Source.REDIS, "w")
        self.member.sources |= set(sources)
        self.members.adopt(self.member, info())
        self.members.note_leases(look(info()), 0.0)
        self.member.healthy = True

    def gone(self, now: float, up_since: float = 0.0, listed: tuple[str, ...] = ("w",)) -> bool:
        seen = look(listed=listed)
        self.members.note_leases(seen, now)
        return self.members.departures(seen, up_since, now) == [self.member]


def test_a_lost_lease_alone_removes_nobody() -> None:
    leased = Leased()
    assert not any(leased.gone(now) for now in (1.0, 100.0, 1000.0))


def test_lease_gone_and_no_answer_for_two_leases_is_the_end() -> None:
    leased = Leased()
    leased.member.healthy = False
    assert not leased.gone(1.0)
    assert not leased.gone(1.0 + 2 * LEASE_S - 0.1)
    assert leased.gone(1.0 + 2 * LEASE_S)


def test_an_outage_of_redis_does_not_count() -> None:
    leased = Leased()
    leased.member.healthy = False
    assert not leased.gone(1.0)
    assert not leased.gone(500.0, up_since=499.0)
    assert leased.gone(499.0 + 2 * LEASE_S, up_since=499.0)


def test_a_lease_that_comes_back_starts_over() -> None:
    leased = Leased()
    leased.member.healthy = False
    assert not leased.gone(1.0)
    leased.members.note_leases(look(info()), 5.0)
    assert not leased.gone(1.0 + 2 * LEASE_S)


@pytest.mark.parametrize("sign", ["draining", "refused"])
def test_who_took_its_lease_back_is_gone_at_once(sign: str) -> None:
    leased = Leased()
    setattr(leased.member, sign, True)
    assert not leased.gone(1.0, listed=("w",)), "its name is still listed: it only lost its lease"
    assert leased.gone(1.1, listed=())


@pytest.mark.parametrize("source", [Source.STATIC, Source.ADMIN])
def test_who_was_named_by_hand_stays_a_member(source: Source) -> None:
    leased = Leased(source)
    leased.member.healthy = False
    leased.member.draining = True
    assert not leased.gone(1.0, listed=())
    assert not leased.gone(1000.0, listed=())


def test_a_ban_holds_for_one_incarnation() -> None:
    leased = Leased()
    leased.members.remove(leased.member, ban=True)
    [sighting] = look(info()).sightings.values()
    assert leased.members.banned(sighting)
    [newer] = look(info(epoch=2)).sightings.values()
    assert not leased.members.banned(newer)
    member = leased.members.add(A, Source.ADMIN)
    leased.members.adopt(member, info())
    assert not leased.members.banned(sighting), "taken in by hand again"


def test_an_uptime_that_goes_back_asks_for_the_name() -> None:
    members = Members()
    member = members.add(A, Source.STATIC)
    members.adopt(member, info())
    member.probes = 1
    member.note_uptime(5.0)
    assert not member.must_identify()
    member.note_uptime(1.0)
    assert member.must_identify()


class Tender:
    """Takes notes."""

    def __init__(self) -> None:
        self.members = Members()
        self.loads: list[WorkerLoad] = []

    def note_load(self, member: Member, load: WorkerLoad) -> None:
        member.note_uptime(load.uptime_s)
        self.loads.append(load)


class Follows:
    def registered(self, worker, epoch, seq, at) -> None:
        pass


def test_a_beat_that_was_overtaken_says_nothing_and_asks_for_nothing() -> None:
    tender = Tender()
    registered = Registered(tender, Follows(), WorkersConfig(), FeedStats(), lambda: 1.0)
    member = tender.members.add(A, Source.REDIS)
    tender.members.adopt(member, info())
    member.probes, member.ask_again = 1, False
    member.note_uptime(7.5)  # it was asked itself
    for uptime_s, taken in ((7.2, 0), (7.5, 1), (8.2, 2), (0.0, 3)):
        beat = Sighting(info(), 1, 0, WorkerLoad(uptime_s=uptime_s))
        registered.looked(Look({beat.info.id: beat}, frozenset({beat.info.id})), 0.0)
        assert len(tender.loads) == taken
        assert member.ask_again is (uptime_s == 0.0)


@pytest.mark.parametrize(
    "text", ["host:1", "ftp://h:1", "http://", "http://h:0", "http://h:x", "http://h?a=1", ""]
)
def test_what_is_no_worker_url_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"workers\.urls"):
        worker_url("workers.urls", text)


def test_the_static_list_is_cleaned_and_has_no_doubles() -> None:
    assert static_urls([" http://a:1/ ", "https://b"]) == ("http://a:1", "https://b")
    with pytest.raises(ConfigError, match="the same worker"):
        static_urls(["http://a", "http://a:80/"])


def test_one_late_answer_takes_no_healthy_worker_out() -> None:
    member = Members().add(A, Source.STATIC)
    member.healthy = True
    assert member.excuses(late=True)
    assert not member.excuses(late=True), "the second one in a row does"
    assert not member.excuses(late=False)
    assert member.excuses(late=True), "an answer in between starts over"


@pytest.mark.parametrize("healthy", [None, False])
def test_a_worker_that_never_was_well_is_not_excused(healthy: bool | None) -> None:
    member = Members().add(A, Source.STATIC)
    member.healthy = healthy
    assert not member.excuses(late=True)
