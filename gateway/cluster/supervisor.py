"""Starts the children in order, reports what happens to them, and stops them in reverse order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from gateway.cluster.child import Child, ChildSpec


class Supervisor:
    """Owns the children. Stages start one after the other; children of one stage start together."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stages: list[list[Child]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._leave = asyncio.Event()
        self._signals = 0

    @property
    def children(self) -> list[Child]:
        """All children, in start order."""
        return [child for stage in self._stages for child in stage]

    def watch_signals(self) -> None:
        """First Ctrl-C or SIGTERM stops in order, the second one kills."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    async def start(self, specs: Sequence[ChildSpec], *, wait: bool) -> None:
        """Start a stage; with ``wait``, return when all of it is ready (or a stop was asked for).

        :raises ChildFailed: a child cannot be brought up.
        """
        stage = [Child(spec, self._say) for spec in specs]
        self._stages.append(stage)
        self._tasks += [asyncio.create_task(child.run()) for child in stage]
        if wait:
            await self.until(lambda: all(child.is_ready.is_set() for child in stage))

    async def until(self, done: Callable[[], bool]) -> None:
        """Return when ``done()`` holds or a stop was asked for; a child's failure is raised."""
        while not done() and not self._leave.is_set():
            self.raise_failures()
            await asyncio.sleep(0.05)

    def raise_failures(self) -> None:
        """Raise what ended a child's task."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    @property
    def killed(self) -> bool:
        """A second signal came."""
        return self._signals > 1

    @property
    def leaving(self) -> bool:
        """A stop was asked for."""
        return self._leave.is_set()

    async def stop(self) -> None:
        """Last stage first; returns when no child is left."""
        self._leave.set()
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop() for child in stage))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_signal(self) -> None:
        self._signals += 1
        self._leave.set()
        if self._signals > 1:
            self._say("killing all children")
            for child in self.children:
                child.kill()
