"""The processes as their parent sees them: who is up, who stands in for whom, what they were told.

    up        a process that runs; the list is ordered by how long
    holders   who accepts connections from the socket of which process: each from its own, but until
              it can serve one that can does it (if there is any)
    catch up  a process that comes up is told what operators changed before

A step of this runs every few hundredths of a second; nothing of it is in the way of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from gateway.cluster.child import Child
from gateway.foster import ADOPT, RELEASE
from gateway.processes.calls import Calls, Silent
from gateway.processes.changes import Change, Changes

STEP_S = 0.05
TRY_EVERY_S = 0.2
CATCH_UP_S = 30.0
"""A worker that a new process has not met by then is none of its workers."""


class Group:
    """Owns the calls; ``run`` it in the background and close it."""

    def __init__(
        self,
        calls: Calls,
        children: Callable[[], Sequence[Child]],
        catch_up_s: float = CATCH_UP_S,
    ) -> None:
        """``children``: by number; the list grows as they are started."""
        self.calls, self.changes = calls, Changes()
        self._children, self._catch_up_s = children, catch_up_s
        self.up: list[int] = []
        """Numbers, the most senior first."""
        self._met: set[int] = set()
        self._serving: dict[int, int] = {}
        """Process: the life in which it could serve."""
        self._holders: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log: Any = structlog.get_logger("headwater.gateway")

    def life(self, process: int) -> int:
        """Another number after each restart."""
        return self._children()[process].deaths

    @property
    def restarts(self) -> int:
        """Of all processes so far."""
        return sum(child.deaths for child in self._children())

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await self.step()
            await asyncio.sleep(STEP_S)

    async def step(self) -> None:
        """Notice who came and went, and see that every socket is accepted from."""
        children = self._children()
        alive = {n for n, c in enumerate(children) if c.is_ready.is_set() and c.pid is not None}
        self.up = [n for n in self.up if n in alive]
        for process in sorted(alive - set(self.up)):
            self.up.append(process)
            if process in self._met:
                self._start(self._catch_up(process, self.changes.all()))
            self._met.add(process)
        self._holders = {n: holder for n, holder in self._holders.items() if holder in alive}
        for process in sorted(self._met):
            await self._see_to(process)

    def can_serve(self, process: int) -> None:
        """It has said that it knows a worker."""
        self._serving[process] = self.life(process)

    def _able(self) -> list[int]:
        return [n for n in self.up if self._serving.get(n) == self.life(n)]

    async def _see_to(self, process: int) -> None:
        """Let the right one accept from a process's socket; the former one stops afterwards."""
        able, before = self._able(), self._holders.get(process)
        if process in able or (process in self.up and not able):
            wanted = process
        elif not self.up or before in able:
            return
        else:
            wanted = (able or self.up)[0]
        if wanted == before or not await self._told(wanted, ADOPT, process):
            return
        self._holders[process] = wanted
        self._log.info("process_accepts", process=wanted, socket=process)
        if before is not None:
            await self._told(before, RELEASE, process)

    def accepts(self, process: int) -> bool:
        """Whether somebody accepts from a process's socket."""
        return process in self._holders

    async def _told(self, other: int, what: str, process: int) -> bool:
        try:
            reply = await self.calls.ask(
                other, "POST", what, msgspec.json.encode({"process": process})
            )
        except Silent:
            return False
        return reply.ok

    def catch_up(self, process: int, change: Change) -> asyncio.Task[None]:
        """Tell a process what it did not do at once."""
        return self._start(self._catch_up(process, [change]))

    async def _catch_up(self, process: int, changes: Sequence[Change]) -> None:
        """Each until it is done: a worker has to be met before it can be drained."""
        life = self.life(process)
        for change in changes:
            deadline = asyncio.get_running_loop().time() + self._catch_up_s
            while change in self.changes.all() and self.life(process) == life:
                try:
                    reply = await self.calls.ask(process, change.method, change.path, change.body)
                except Silent:
                    reply = None
                if reply is not None and reply.ok:
                    break
                if asyncio.get_running_loop().time() > deadline:
                    self._log.warning(
                        "process_behind", process=process, worker=change.worker, what=change.action
                    )
                    break
                await asyncio.sleep(TRY_EVERY_S)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name="process-catch-up")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End all tasks and connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.calls.close()
