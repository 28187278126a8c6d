"""Redis for one task: one connection per server, thrown away at the first doubt.

A pool hands a connection on whose last reply was never read; a cancelled command then answers its
successor. Here nothing is handed on: after an error, a timeout or a cancellation all connections of
the link are dropped, and the next call opens new ones. Timeouts hold whatever the URL says.

What stands behind the address (one server, a master that Sentinels name, a Cluster) is found out
when a connection is opened, so that a failover or a move of slots costs one failed call at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from shared.rediskeys import Command, Reply
from shared.redisurl import Address, Host, Kind, parse
from shared.slots import SlotMap, key_of, slot_of

MAX_PIPELINE = 1000
"""Commands in one write, at most."""
_LONGEST_WAIT_S = 10.0
_OPENING = 2.0
"""To find the servers and connect takes several round trips, and a handshake with TLS."""
_MAX_REDIRECTS = 4
_REDIRECT_PAUSE_S = 0.02


class RedisLost(Exception):
    """Redis cannot be used now; the message says why, without credentials."""


class RedisLink:
    """``call`` and ``transact`` are not reentrant: one task owns a link."""

    def __init__(self, url: str, timeout_s: float, name: str = "headwater") -> None:
        """:param name: shown by ``CLIENT LIST``.

        :raises ConfigError: the URL is none that could be used.
        """
        self._address: Address = parse(url)
        self._timeout_s, self._name = timeout_s, name
        self._hosts = list(self._address.hosts)
        """Where to ask first; one that failed goes to the end."""
        self._asking: Host | None = None
        self._wires: dict[Host | None, AbstractConnection] = {}
        self._master: Host | None = None
        self._slots: SlotMap | None = None

    @property
    def connected(self) -> bool:
        """A connection is open (which says nothing about the peer)."""
        return bool(self._wires)

    @property
    def cluster(self) -> bool:
        """The keys are spread over several servers. Known once a call has worked."""
        return self._slots is not None

    async def call(
        self,
        commands: Sequence[Command],
        wait_s: float = 0.0,
        *,
        at: Mapping[int, str] | None = None,
    ) -> list[Reply]:
        """Send all commands in one write per server and read all replies.

        :param wait_s: how much longer than usual the server may take (a blocking read).
        :param at: for commands without a key, by place: the key whose server is meant. Without it
            a Cluster's commands without a key go to any one of its masters.
        :returns: one raw RESP2 reply per command; an error reply of a single command is returned in
            its place as ``ResponseError``.
        :raises RedisLost: no connection, no answer in time, or a server that is no master any more.
        """
        if len(commands) > MAX_PIPELINE:
            raise ValueError(f"{len(commands)} commands in one pipeline")
        try:
            if not self._wires:
                async with asyncio.timeout(_OPENING * self._timeout_s):
                    await self._open()
            async with asyncio.timeout(self._timeout_s + min(wait_s, _LONGEST_WAIT_S)):
                if self._slots is None:
                    return _settled(await self._exchange(self._master, commands))
                return await self._spread(self._slots, commands, at or {})
        except BaseException as error:
            await self._give_up()
            if (reason := _reason(error)) is None:
                raise
            raise RedisLost(reason) from error

    async def transact(self, commands: Sequence[Command]) -> list[Reply]:
        """All commands or none, in one ``MULTI``; their keys share a slot.

        :raises RedisLost: as for :meth:`call`, or one of the commands was refused.
        """
        try:
            if not self._wires:
                async with asyncio.timeout(_OPENING * self._timeout_s):
                    await self._open()
            async with asyncio.timeout(self._timeout_s):
                return await self._transact(commands)
        except BaseException as error:
            await self._give_up()
            if (reason := _reason(error)) is None:
                raise
            raise RedisLost(reason) from error

    async def drop(self) -> None:
        """Close without waiting; safe while being cancelled."""
        wires, self._wires = self._wires, {}
        self._slots = None
        for wire in wires.values():
            await wire.disconnect(nowait=True)

    async def _give_up(self) -> None:
        """Drop all; next time another host is asked first if this one did not tell its servers."""
        if self._asking is not None:
            self._hosts.remove(self._asking)
            self._hosts.append(self._asking)
            self._asking = None
        await self.drop()

    # -------------------------------------------------------------- finding the servers

    async def _open(self) -> None:
        if self._address.kind is Kind.SENTINEL:
            self._master = await self._ask_sentinels()
            await self._wire(self._master)
            return
        self._master = None
        if not self._hosts:
            await self._wire(None)
            return
        self._asking = first = self._hosts[0]
        # A server that is none of a Cluster, or a user without the right to ask, gets an error.
        [reply] = await self._exchange(first, [("CLUSTER", "SLOTS")])
        if isinstance(reply, list):
            self._slots = SlotMap.read(reply, first)
            masters = self._slots.hosts()
            self._hosts += [host for host in masters if host not in self._hosts]
        elif self._address.kind is Kind.CLUSTER:
            raise RedisLost(f"{first} is no node of a Cluster: {reply}")
        self._master, self._asking = first, None

    async def _ask_sentinels(self) -> Host:
        reasons = []
        for host in list(self._hosts):
            wire = self._address.sentinel(host, self._timeout_s)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await wire.connect_check_health(check_health=False, retry_socket_connect=False)
                    command = ("SENTINEL", "get-master-addr-by-name", self._address.master)
                    [reply] = await _talk(wire, [command])
            except (RedisError, OSError, TimeoutError) as error:
                reply = error
            finally:
                await wire.disconnect(nowait=True)
            if isinstance(reply, list) and len(reply) == 2:
                return Host(reply[0].decode(), int(reply[1]))
            self._hosts.remove(host)
            self._hosts.append(host)
            known = type(reply).__name__ if reply is not None else "knows no master of that name"
            reasons.append(f"{host}: {known}")
        raise RedisLost(f"no Sentinel names the master ({'; '.join(reasons)})")

    async def _wire(self, host: Host | None) -> AbstractConnection:
        wire = self._wires.get(host)
        if wire is None:
            # Kept before it is connected, so that a cancelled handshake is dropped like the rest.
            wire = self._wires[host] = self._address.connection(host, self._timeout_s)
            await wire.connect_check_health(check_health=False, retry_socket_connect=False)
            # A user without the right to have a name is anonymous; redis-py would fail.
            await _talk(wire, [("CLIENT", "SETNAME", self._name)])
        return wire

    # -------------------------------------------------------------- talking to them

    async def _exchange(self, host: Host | None, commands: Sequence[Command]) -> list[Reply]:
        return await _talk(await self._wire(host), commands)

    async def _spread(
        self, slots: SlotMap, commands: Sequence[Command], at: Mapping[int, str]
    ) -> list[Reply]:
        """Each command to the server of its key; those that have moved are sent again."""
        replies: list[Reply] = [None] * len(commands)
        hosts = {
            place: slots.host(None if key is None else slot_of(key))
            for place, command in enumerate(commands)
            for key in [at.get(place) or key_of(command)]
        }
        asking: set[int] = set()
        for turn in range(_MAX_REDIRECTS):
            await self._round(commands, hosts, asking, replies)
            again: dict[int, Host] = {}
            asking = set()
            for place, host in hosts.items():
                reply = replies[place]
                if isinstance(reply, AskError):
                    again[place] = target = Host(reply.host or host.host, int(reply.port))
                    if isinstance(reply, MovedError):
                        slots.moved(int(reply.slot_id), target)
                    else:
                        asking.add(place)
                elif isinstance(reply, TryAgainError):
                    again[place] = host
            if not again:
                return replies
            hosts = again
            await asyncio.sleep(_REDIRECT_PAUSE_S * turn)
        raise RedisLost("the Cluster is moving its slots")

    async def _round(
        self,
        commands: Sequence[Command],
        hosts: Mapping[int, Host],
        asking: set[int],
        replies: list[Reply],
    ) -> None:
        """Write to all servers first, then read from all: one round trip."""
        lots: dict[Host, list[int]] = {}
        for place in sorted(hosts):
            lots.setdefault(hosts[place], []).append(place)
        for host, places in lots.items():
            wire = await self._wire(host)
            await _write(wire, _with_asking(commands, places, asking))
        for host, places in lots.items():
            for place in places:
                if place in asking:
                    await _read(self._wires[host])
                replies[place] = await _read(self._wires[host])

    async def _transact(self, commands: Sequence[Command]) -> list[Reply]:
        slots, host = self._slots, self._master
        slot = None if slots is None else slot_of(key_of(commands[0]) or "")
        for _ in range(_MAX_REDIRECTS):
            if slots is not None:
                host = slots.host(slot)
            *queued, executed = await self._exchange(host, [("MULTI",), *commands, ("EXEC",)])
            moved = [reply for reply in queued if isinstance(reply, MovedError)]
            if slots is not None and slot is not None and moved:
                known = host.host if host is not None else ""
                slots.moved(slot, Host(moved[0].host or known, int(moved[0].port)))
                continue
            found = executed if isinstance(executed, list) else [executed]
            for reply in (*queued, *found):
                if isinstance(reply, Exception):
                    raise reply
            return found
        raise RedisLost("the Cluster is moving its slots")


def _reason(error: BaseException) -> str | None:
    """What to say about an outage; None: it is something else."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, RedisError | OSError):
        return f"{type(error).__name__}: {error}"
    return None


def _settled(replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, MovedError):
            raise RedisLost("a Cluster, and this user may not ask for CLUSTER SLOTS")
    return replies


def _with_asking(
    commands: Sequence[Command], places: Sequence[int], asking: set[int]
) -> list[Command]:
    sent: list[Command] = []
    for place in places:
        if place in asking:
            sent.append(("ASKING",))
        sent.append(commands[place])
    return sent


async def _talk(wire: AbstractConnection, commands: Sequence[Command]) -> list[Reply]:
    await _write(wire, commands)
    return [await _read(wire) for _ in commands]


async def _write(wire: AbstractConnection, commands: Sequence[Command]) -> None:
    await wire.send_packed_command(wire.pack_commands(commands), check_health=False)


async def _read(wire: AbstractConnection) -> Any:
    try:
        return await wire.read_response()
    except (ReadOnlyError, ClusterDownError):
        raise
    except ResponseError as error:
        return error
