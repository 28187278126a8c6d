"""Epochs of workers that have none of their own: each incarnation of a foreign server gets one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from gateway.feeds.members import Member
from shared.load import WorkerInfo
from shared.types import Epoch


class Epochs:
    """Makes epochs from the wall clock and chance."""

    def __init__(self, wall: Callable[[], float], rng: Random) -> None:
        self._wall, self._rng = wall, rng

    def dated(self, member: Member, info: WorkerInfo) -> WorkerInfo:
        """What an address said of itself, with its epoch: a foreign server's stays, unless it was
        down, is new, or has blocks of another size."""
        if info.engine == "headwater":
            return info
        known = member.info
        same = known is not None and known.engine == info.engine and not member.refused
        if known is not None and same and known.block_size == info.block_size:
            return msgspec.structs.replace(info, epoch=known.epoch)
        return msgspec.structs.replace(info, epoch=self.next(known))

    def next(self, known: WorkerInfo | None) -> Epoch:
        """For a foreign server's next incarnation: above the last one."""
        made = int(self._wall() * 1e3) << 16 | self._rng.getrandbits(16)
        return Epoch(max(made, 0 if known is None else known.epoch + 1))
