"""Which server of a Redis Cluster holds a key."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import ClusterDownError

from shared.redisurl import Host

SLOTS = 16384
_KEYLESS = {"ROLE", "TIME", "INFO", "PING", "CLUSTER", "CLIENT", "MULTI", "EXEC", "ECHO"}
_SECOND = {"XINFO"}
"""Commands with a word between their name and their key."""


def slot_of(key: str | bytes) -> int:
    """The slot of a key; only what stands between braces counts, if there are any."""
    return int(key_slot(key.encode() if isinstance(key, str) else key))


def key_of(command: Sequence[Any]) -> str | None:
    """First key of one of the commands that we send; None: it has none."""
    name = str(command[0])
    if name in _KEYLESS:
        return None
    if name == "EVAL":
        return str(command[3])
    if name == "XREAD":
        return str(command[command.index("STREAMS") + 1])
    return str(command[2 if name in _SECOND else 1])


class SlotMap:
    """Ranges of slots with their masters, as of the last look; corrected by ``MOVED`` replies."""

    def __init__(self, ranges: Sequence[tuple[int, int, Host]]) -> None:
        """:param ranges: (first slot, last slot, master)."""
        self._ranges = sorted(ranges, key=lambda each: each[0])
        self._starts = [first for first, _, _ in self._ranges]
        self._moved: dict[int, Host] = {}

    @classmethod
    def read(cls, reply: Sequence[Any], asked: Host) -> SlotMap:
        """From a reply to ``CLUSTER SLOTS``.

        :param asked: who answered: a node that does not know its own address leaves it out.
        :raises ClusterDownError: a Cluster without slots.
        """
        ranges = []
        for first, last, (name, port, *_), *_ in reply:
            host = name.decode() if name else asked.host
            ranges.append((int(first), int(last), Host(host, int(port))))
        if not ranges:
            raise ClusterDownError("no slot is served")
        return cls(ranges)

    def host(self, slot: int | None) -> Host:
        """The master of a slot; any master for None.

        :raises ClusterDownError: nobody serves it.
        """
        if slot is None:
            return self._ranges[0][2]
        if slot in self._moved:
            return self._moved[slot]
        at = bisect_right(self._starts, slot) - 1
        if at < 0 or self._ranges[at][1] < slot:
            raise ClusterDownError(f"nobody serves slot {slot}")
        return self._ranges[at][2]

    def hosts(self) -> list[Host]:
        """All masters."""
        return list(dict.fromkeys(host for _, _, host in self._ranges))

    def moved(self, slot: int, host: Host) -> None:
        """A server said that the slot is with another one now."""
        self._moved[slot] = host
