"""Workers that register themselves in Redis: one look each second, pipelined, no key walks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from redis.exceptions import NoPermissionError

from gateway.discovery.base import Look, Sighting
from gateway.index.redis import (
    forget_member_command,
    members_commands,
    parse_members,
    parse_registration,
    registration_commands,
)
from shared.rediskeys import Command, RedisKeys, Reply
from shared.redislink import RedisLost
from shared.types import WorkerId

COMMANDS_PER_TRIP = 500
STALE_LOOKS = 60
"""A name without a lease for this many looks in a row is taken out of its set."""


class Caller(Protocol):
    """Carries commands to Redis; see ``shared.redislink``."""

    async def call(self, commands: Sequence[Command], wait_s: float = 0.0) -> list[Reply]:
        """One reply per command, or the link's own error."""
        ...


class RedisDiscovery:
    """Remembers the last load text of each worker, to tell a fresh one from an old one."""

    def __init__(self, keys: RedisKeys) -> None:
        self._keys = keys
        self._loads: dict[WorkerId, bytes] = {}
        self._without_lease: dict[WorkerId, int] = {}

    async def look(self, link: Caller) -> Look:
        """All registrations; errors of the link pass through."""
        replies = await link.call(members_commands(self._keys))
        for reply in replies:
            if isinstance(reply, NoPermissionError):
                # Else it would look like a Redis that works and in which nobody is registered.
                raise RedisLost(f"SMEMBERS: {reply}")
        listed = parse_members(replies)
        found: dict[WorkerId, Sighting] = {}
        unreadable: dict[WorkerId, str] = {}
        for start in range(0, len(listed), COMMANDS_PER_TRIP):
            names = listed[start : start + COMMANDS_PER_TRIP]
            replies = await link.call(registration_commands(self._keys, names))
            for name, reply in zip(names, replies, strict=True):
                try:
                    sighting = self._sighting(name, reply)
                except (msgspec.DecodeError, RecursionError) as error:
                    unreadable[name] = str(error)[:200]
                    continue
                if sighting is not None:
                    found[name] = sighting
        await self._tidy(link, listed, found)
        return Look(found, frozenset(listed), unreadable)

    def _sighting(self, name: WorkerId, reply: Reply) -> Sighting | None:
        registration = parse_registration(reply)
        if registration is None:
            return None
        if registration.info.id != name:
            raise msgspec.DecodeError("registered under another's name")
        fresh = self._loads.get(name) != registration.raw_load
        self._loads[name] = registration.raw_load
        return Sighting(
            registration.info,
            registration.epoch,
            registration.seq,
            registration.load if fresh else None,
        )

    async def _tidy(
        self, link: Caller, listed: Sequence[WorkerId], found: dict[WorkerId, Sighting]
    ) -> None:
        """Sets live as long as one worker of their shard: names of dead ones must not pile up."""
        missing = [name for name in listed if name not in found]
        self._without_lease = {n: self._without_lease.get(n, 0) + 1 for n in missing}
        self._loads = {name: self._loads[name] for name in found}
        stale = [name for name in missing if self._without_lease[name] > STALE_LOOKS]
        if stale:
            await link.call(
                [forget_member_command(self._keys, name) for name in stale[:COMMANDS_PER_TRIP]]
            )
