"""One rank's event stream over ZMQ: live batches, the filling of holes, and what was lost.

    SUB     [topic][sequence u64 BE][payload]        live; silently drops what nobody takes in time
    DEALER  -> ["" , first sequence u64 BE]          repeats what was published, if there is such a
            <- ["" , sequence, payload] ... -1       place

Judging is pure (``gateway.engines.continuity``); here bytes are moved. A batch that comes out is
the next of its incarnation, whatever road it took. What cannot be had any more is told as a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gateway.engines.continuity import Continuity, Replayed, Verdict
from gateway.engines.frames import FRAME_LIMIT
from gateway.index.stats import FeedStats

POLL_S = 0.5
"""How often a quiet stream is looked after."""
BURST = 64
"""Live batches taken in without giving others a turn."""
VERIFY_S = 10.0
"""A stream that is quiet for so long is compared with its replay: its end may have been lost."""
REPLAY_STEP_S = 3.0
"""A replay that sends nothing for so long has failed."""
RETRY_S = 1.0
QUEUE = 100_000
"""Batches that wait here at most; beyond it ZMQ drops."""
BEAT_MS, DEAD_MS = 2000, 6000
_END = b"\xff" * 8
_UP = frozenset({zmq.EVENT_HANDSHAKE_SUCCEEDED})
_DOWN = frozenset({zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED})


class What(Enum):
    """What a stream tells."""

    BATCH = auto()
    COMPLETE = auto()
    """Everything since the engine's start has been told."""
    RESTARTED = auto()
    """Another incarnation: what was told before is void. It begins from nothing."""
    LATE = auto()
    """The first batch that came is not the first there was, and what was before cannot be had."""
    LOST = auto()
    """Some batches are gone for good: what was told before cannot be relied on."""
    QUIET = auto()
    """Nothing new; a sign of life if the stream is connected."""


@dataclass(frozen=True, slots=True)
class Told:
    """One thing that a stream tells."""

    what: What
    payload: bytes = b""
    reason: str = ""


class ReplayFailed(Exception):
    """The replay did not answer, or not as it should."""


class RankStream:
    """Follows one endpoint. ``async for told in stream.follow()``; never ends by itself."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        replay: str | None,
        topic: str,
        stats: FeedStats,
    ) -> None:
        self._context, self._endpoint, self._replay = context, endpoint, replay
        self._topic, self._stats = topic, stats
        self.connected = False
        self.position = Continuity()
        self._cut = False
        """The connection was lost and has not been made good yet."""
        self._begun = False
        """The beginning of the stream has been looked for."""
        self._restarts = 0
        self._retry_at = 0.0
        self._verify_at = 0.0
        self._log: Any = structlog.get_logger("gateway.feeds")

    def restart(self) -> None:
        """Somebody else has seen that the engine was started anew: begin from nothing."""
        self.position.restart()
        self._begun = False
        self._restarts += 1

    @property
    def silent_so_far(self) -> bool:
        """Connected without a break, and nothing has come in this incarnation."""
        unbroken = self.connected and not self._cut
        return unbroken and self.position.last < 0 and self.position.live < 0

    async def follow(self) -> AsyncGenerator[Told, None]:
        """Everything that happens on the stream."""
        socket = self._subscribe()
        # Before it connects: what happened earlier is told to no monitor.
        monitor = socket.get_monitor_socket()
        socket.connect(self._endpoint)
        try:
            while True:
                self._look_at_connection(monitor)
                async for told in self._look_after():
                    yield told
                if not await socket.poll(POLL_S * 1000):
                    # Quiet with whom: another process may be there by now.
                    self._look_at_connection(monitor)
                    yield Told(What.QUIET)
                    continue
                for _ in range(BURST):
                    try:
                        parts = await socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._look_at_connection(monitor)
                    for told in self._cut_over():
                        yield told
                    async for told in self._live(parts):
                        yield told
                await asyncio.sleep(0)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _subscribe(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_MS)
        socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        return socket

    def _look_at_connection(self, monitor: Any) -> None:
        shadow: zmq.Socket[bytes] = zmq.Socket.shadow(monitor.underlying)
        while shadow.poll(0):
            event = parse_monitor_message(shadow.recv_multipart())["event"]
            if event in _UP:
                self.connected = True
            elif event in _DOWN and self.connected:
                self.connected, self._cut = False, True

    async def _look_after(self) -> AsyncGenerator[Told, None]:
        """Find the beginning, make good a lost connection, look for a lost end."""
        now = asyncio.get_running_loop().time()
        if not self.connected or now < self._retry_at:
            return
        for told in self._cut_over():
            yield told
        if self._replay is None:
            self._begun = True
            return
        if not self._begun or self._cut or now >= self._verify_at:
            async for told in self._fill():
                yield told

    def _cut_over(self) -> Iterator[Told]:
        """After a cut whoever is there now may be another process: what it tells is told anew, if
        nobody can be asked."""
        if self._cut and self.connected and self._replay is None:
            self._cut = False
            self.restart()
            yield Told(What.RESTARTED, reason="its event connection was cut")

    async def _live(self, parts: list[bytes]) -> AsyncGenerator[Told, None]:
        if len(parts) != 3 or len(parts[1]) != 8:
            self._stats.malformed_frames += 1
            return
        seq, payload = int.from_bytes(parts[1], "big"), parts[2]
        verdict = self.position.judge(seq)
        if verdict is Verdict.OLD:
            return
        if verdict is Verdict.RESTARTED:
            self.restart()
            self.position.judge(seq)
            yield Told(What.RESTARTED, reason="its event numbers began anew")
            verdict = Verdict.NEXT if seq == 0 else Verdict.GAP
        if verdict is Verdict.GAP:
            self._stats.engine_gaps += self.position.last >= 0
            restarts = self._restarts
            async for told in self._fill():
                yield told
            if seq <= self.position.last or (self._restarts != restarts and self.position.last < 0):
                return
            if seq != self.position.last + 1:
                late = self.position.last < 0
                yield Told(What.LATE if late else What.LOST, reason=self._why_lost(seq))
                self._begun = True
        elif seq == 0:
            yield Told(What.COMPLETE)
        self._take(seq, payload)
        yield Told(What.BATCH, payload)

    def _why_lost(self, seq: int) -> str:
        count = seq - self.position.last - 1
        where = "its replay keeps them no longer" if self._replay else "it has no replay endpoint"
        return f"{count} batches of its events were lost and {where}"

    def _take(self, seq: int, payload: bytes) -> None:
        self.position.take(seq, payload)
        self._verify_at = asyncio.get_running_loop().time() + VERIFY_S

    async def _fill(self) -> AsyncGenerator[Told, None]:
        """Ask the replay for everything after the last batch; recognise another incarnation."""
        if self._replay is None:
            return
        loop, restarts = asyncio.get_running_loop(), self._restarts
        try:
            async for told in self._replayed():
                yield told
                if told.what is What.RESTARTED:
                    restarts = self._restarts
                elif self._restarts != restarts:
                    return
        except ReplayFailed as error:
            self._retry_at = loop.time() + RETRY_S
            self._log.info("engine_replay_failed", endpoint=self._replay, reason=str(error))
            return
        self._begun, self._cut = True, False
        self._verify_at = loop.time() + VERIFY_S

    async def _replayed(self) -> AsyncGenerator[Told, None]:
        position, first = self.position, True
        async for seq, payload in self._batches(position.ask_from()):
            if first:
                first = False
                found = position.begin_replay(seq, payload)
                if found is Replayed.ANOTHER:
                    self.restart()
                    yield Told(What.RESTARTED, reason="its replay is of another start")
                    async for told in self._replayed():
                        yield told
                    return
                if found is Replayed.SAME and seq == position.last:
                    continue
                if found is Replayed.TOO_LATE and position.last >= 0:
                    yield Told(What.LOST, reason=self._why_lost(seq))
                if found is Replayed.SAME:
                    yield Told(What.COMPLETE)
            if seq <= position.last:
                continue
            self._stats.engine_replays += 1
            self._take(seq, payload)
            yield Told(What.BATCH, payload)
        if first and position.last >= 0:
            # It keeps nothing, though something was published: another process.
            self.restart()
            yield Told(What.RESTARTED, reason="its replay is empty")
        if first and position.live < 0:
            yield Told(What.COMPLETE)

    async def _batches(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        assert self._replay is not None
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(self._replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            taken = 0
            while True:
                if not await socket.poll(REPLAY_STEP_S * 1000):
                    raise ReplayFailed(f"no answer within {REPLAY_STEP_S:g} s")
                parts = await socket.recv_multipart()
                if len(parts) != 3 or len(parts[1]) != 8:
                    raise ReplayFailed(f"{len(parts)} parts in an answer")
                if parts[1] == _END:
                    return
                yield int.from_bytes(parts[1], "big"), parts[2]
                taken += 1
                if taken % BURST == 0:
                    await asyncio.sleep(0)
        finally:
            socket.close(linger=0)
