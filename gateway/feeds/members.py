"""Who may be a worker, who is one, and when one is gone. No I/O; time is an argument.

A member is an address that some source named. It becomes a worker when the address has said who it
is. The same worker named twice (by the list and by Redis, under two addresses) is one worker.

A worker leaves by itself only if nothing but Redis named it, and then only if
    it drained and took its lease back: at once; or
    its lease is gone, Redis has been well for two leases since, and its address does not answer.
So a flushed, evicting or dead Redis never removes a worker that serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from gateway.discovery.base import Look, Sighting, Source
from shared.load import WorkerInfo
from shared.rediskeys import LEASE_MS
from shared.types import Epoch, WorkerId

LEASE_S = LEASE_MS / 1000.0
NOT_PROBED = "not probed yet"
LATE_PROBES = 2
"""So many probes in a row without an answer in time take a worker out."""
SILENT_PROBES = 5
"""After so many in a row (10 s and more) it is taken to hang: what it has not begun to answer is
asked of others."""
START_STEP_S = 1.0
IDENTIFY_EVERY = 10
"""Probes between two questions of who it is, when nothing else asks for one."""


class Adoption(StrEnum):
    """What a member's answer to "who are you" changed."""

    JOINED = "joined"
    RESTARTED = "restarted"
    UPDATED = "updated"
    SAME = "same"
    ALIAS = "alias"
    """Another address of a worker that is there already: the member was dropped."""
    CONFLICT = "conflict"
    """Another live worker has this name: the member stays outside."""


@dataclass(eq=False, repr=False, slots=True)
class Member:
    """One address."""

    url: str
    sources: set[Source] = field(default_factory=set)
    claimed: WorkerId | None = None
    """Name under which it registered itself."""
    info: WorkerInfo | None = None
    healthy: bool | None = None
    """None: not probed yet."""
    refused: bool = False
    """Nobody listened at the last probe."""
    reason: str = NOT_PROBED
    draining: bool = False
    """It said so itself."""
    listed_drain: str = ""
    """Why a list wants no new requests on it, as the router was told; empty: none does."""
    uptime_s: float = 0.0
    work: float | None = None
    """Tokens that an engine of another make has worked on, as it said last."""
    started: float | None = None
    """When it says that it was started."""
    redis_load_at: float | None = None
    """When Redis told a load that was new."""
    leased: bool = False
    lease_lost_at: float | None = None
    probes: int = 0
    late: int = 0
    """Probes in a row that nothing came back from in time, though somebody listens."""
    ask_again: bool = True
    """Whether the next probe asks who it is."""

    def __repr__(self) -> str:
        return f"Member({self.url})"

    def must_identify(self) -> bool:
        """The next probe has to ask who it is."""
        return self.info is None or self.ask_again or self.probes % IDENTIFY_EVERY == 0

    def excuses(self, late: bool) -> bool:
        """Note whether a probe's answer was late; a healthy worker may be late once. On a busy
        machine one late answer says little, and taking the last worker out refuses requests."""
        self.late = self.late + 1 if late else 0
        return late and bool(self.healthy) and self.late < LATE_PROBES

    def note_uptime(self, uptime_s: float) -> None:
        """An uptime that went back means another process."""
        if uptime_s < self.uptime_s:
            self.ask_again = True
        self.uptime_s = uptime_s

    def note_reading(self, work: float | None, started: float | None) -> bool:
        """What an engine of another make says about its life; True: it is another process.

        A counter that went back says so, and a start that moved by more than a clock's step.
        """
        before, moved = self.work, False
        if started is not None:
            moved = self.started is not None and abs(started - self.started) > START_STEP_S
            self.started = started
        if work is not None:
            self.work = work
        return moved or (work is not None and before is not None and work < before)


class Members:
    """All members by address, and the workers among them by name."""

    def __init__(self) -> None:
        self._by_url: dict[str, Member] = {}
        self._by_id: dict[WorkerId, Member] = {}
        self._banned: dict[WorkerId, Epoch] = {}
        """Removed by hand: this incarnation does not come back through Redis."""

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_url.values()))

    def __len__(self) -> int:
        return len(self._by_url)

    def at(self, url: str) -> Member | None:
        """The member at an address."""
        return self._by_url.get(url)

    def worker(self, worker: WorkerId) -> Member | None:
        """The member that is this worker."""
        return self._by_id.get(worker)

    def add(self, url: str, source: Source, claimed: WorkerId | None = None) -> Member:
        """A source names an address."""
        member = self._by_url.setdefault(url, Member(url))
        member.sources.add(source)
        member.claimed = claimed or member.claimed
        return member

    def adopt(self, member: Member, info: WorkerInfo) -> Adoption:
        """The address said who it is (``info.url`` is taken from the member)."""
        member.ask_again = False
        info = msgspec.structs.replace(info, url=member.url)
        before = member.info
        if before is not None and before.id != info.id:
            self._release_name(member)
            before = None
        other = self._by_id.get(info.id)
        if other is not None and other is not member:
            return self._meet(member, other, info)
        member.info = info
        self._by_id[info.id] = member
        if Source.ADMIN in member.sources:
            self._banned.pop(info.id, None)
        self._drop_claims(member)
        if before is None:
            return Adoption.JOINED
        if before.epoch != info.epoch:
            member.uptime_s, member.draining = 0.0, False
            member.work = member.started = None
            return Adoption.RESTARTED
        return Adoption.SAME if before == info else Adoption.UPDATED

    def _release_name(self, member: Member) -> None:
        if member.info is not None and self._by_id.get(member.info.id) is member:
            del self._by_id[member.info.id]
        member.info = None

    def _meet(self, member: Member, other: Member, info: WorkerInfo) -> Adoption:
        assert other.info is not None
        if other.info.epoch == info.epoch:
            other.sources |= member.sources
            self._by_url.pop(member.url, None)
            return Adoption.ALIAS
        if other.healthy and not other.ask_again:
            # Either two workers share a name, or the other address serves a new process, too.
            other.ask_again = True
            member.ask_again = True
            member.reason = f"another worker is named {info.id}"
            return Adoption.CONFLICT
        # The name has moved to this address.
        self._by_url.pop(other.url, None)
        member.sources |= other.sources
        member.info = info
        self._by_id[info.id] = member
        return Adoption.RESTARTED

    def _drop_claims(self, member: Member) -> None:
        """Addresses that registered under this name and never answered are the same worker."""
        assert member.info is not None
        for other in self:
            if other is not member and other.info is None and other.claimed == member.info.id:
                member.sources |= other.sources
                self._by_url.pop(other.url, None)

    def look_for(self, sighting: Sighting) -> Member | None:
        """The member that a registration speaks of; None: it is banned or unknown."""
        if self._banned.get(sighting.info.id) == sighting.epoch:
            return None
        return self._by_id.get(sighting.info.id) or self._by_url.get(sighting.info.url)

    def banned(self, sighting: Sighting) -> bool:
        """Removed by hand, and still the same incarnation."""
        return self._banned.get(sighting.info.id) == sighting.epoch

    def note_leases(self, look: Look, now: float) -> None:
        """Which leases there were when Redis was looked at, at ``now``."""
        for member in self:
            name = member.info.id if member.info is not None else member.claimed
            if name in look.sightings:
                member.leased, member.lease_lost_at = True, None
            elif member.leased and member.lease_lost_at is None:
                member.lease_lost_at = now

    def departures(self, look: Look, redis_up_since: float, now: float) -> list[Member]:
        """Members that are gone (see the module's rule)."""
        gone = []
        for member in self:
            if member.sources != {Source.REDIS} or member.lease_lost_at is None:
                continue
            name = member.info.id if member.info is not None else member.claimed
            waited = now - max(member.lease_lost_at, redis_up_since)
            withdrawn = name not in look.listed and (member.draining or member.refused)
            if withdrawn or (waited >= 2 * LEASE_S and not member.healthy):
                gone.append(member)
        return gone

    def remove(self, member: Member, *, ban: bool = False) -> None:
        """Drop a member; ``ban`` keeps this incarnation from coming back through Redis."""
        self._by_url.pop(member.url, None)
        if member.info is not None and ban:
            self._banned[member.info.id] = member.info.epoch
        if member.info is not None and self._by_id.get(member.info.id) is member:
            del self._by_id[member.info.id]
