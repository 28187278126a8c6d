"""Which list names which address, and what follows for the workers there. Pure.

A worker may be named by several lists, and under several addresses: it stays until the last of them
has let go, and drains as soon as one of them says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.discovery.base import Listing, Source
from gateway.feeds.members import Member, Members


@dataclass(frozen=True, slots=True)
class Changes:
    """What a new listing asks for."""

    add: tuple[str, ...]
    """Addresses where nobody is known yet."""
    leave: tuple[Member, ...]
    """Members that nobody names any more."""


@dataclass(slots=True)
class Claims:
    """The present listings, and the addresses that turned out to be another's."""

    members: Members
    _listed: dict[Source, Listing] = field(default_factory=dict)
    _aliases: dict[str, Member] = field(default_factory=dict)
    _dismissed: set[str] = field(default_factory=set)
    """Removed by hand: not taken in again while some list goes on naming them."""

    def take(self, source: Source, listing: Listing) -> Changes:
        """A list has been read. Members that were known get or lose their mark here."""
        before = self._listed.get(source, Listing({})).workers
        self._listed[source] = listing
        everywhere = {url for one in self._listed.values() for url in one.workers}
        self._dismissed &= everywhere
        add = []
        for url in listing.workers:
            if url in self._dismissed:
                continue
            member = self.at(url)
            if member is None:
                add.append(url)
            else:
                member.sources.add(source)
        leave = [
            member
            for url in before
            if url not in listing.workers and (member := self._let_go(url, source)) is not None
        ]
        return Changes(tuple(add), tuple(leave))

    def _let_go(self, url: str, source: Source) -> Member | None:
        """The member at ``url``, if nothing names it any more."""
        member = self.at(url)
        if member is None:
            return None
        if any(self.at(other) is member for other in self._listed[source].workers):
            return None
        member.sources.discard(source)
        return None if member.sources else member

    def at(self, url: str) -> Member | None:
        """Who is known at an address, or was met there under another one."""
        member = self.members.at(url)
        if member is not None:
            return member
        other = self._aliases.get(url)
        if other is None:
            return None
        if self.members.at(other.url) is other and other.healthy is not False:
            return other
        # The other address went silent: this one may know more, and is asked itself.
        return None

    def alias(self, url: str, worker: Member) -> None:
        """The address belongs to a worker that is known under another one."""
        self._aliases[url] = worker

    def dismiss(self, member: Member) -> None:
        """A member was removed by hand."""
        self._dismissed.add(member.url)
        self._dismissed.update(url for url, other in self._aliases.items() if other is member)

    def welcome(self, url: str) -> None:
        """An address was added by hand."""
        self._dismissed.discard(url)

    def forget(self, member: Member) -> None:
        """A member is gone."""
        for url in [url for url, other in self._aliases.items() if other is member]:
            del self._aliases[url]

    def drains(self) -> dict[Member, str]:
        """Members that some list wants no new requests on, each with the reason."""
        found: dict[Member, str] = {}
        for listing in self._listed.values():
            for url, reason in listing.workers.items():
                member = self.at(url) if reason else None
                if member is not None:
                    found[member] = reason
        return found
