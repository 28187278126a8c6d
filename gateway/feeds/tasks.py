"""Background tasks that neither die in silence nor outlive their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

import structlog

from gateway.index.stats import FeedStats

RESTART_S = 1.0


class TaskSet:
    """Named tasks. An unexpected error is logged and counted, and the task begins anew."""

    def __init__(self, stats: FeedStats) -> None:
        self._stats = stats
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._logger: Any = structlog.get_logger("gateway.feeds")

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tasks

    def running(self) -> list[Hashable]:
        """Keys of the tasks that run now."""
        return list(self._tasks)

    def spawn(self, key: Hashable, body: Callable[[], Awaitable[None]]) -> None:
        """Run ``body`` until it returns. A key that runs already is left alone."""
        if key in self._tasks:
            return
        task = asyncio.create_task(self._guard(key, body), name=f"feeds:{key}")
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._drop(key, done))

    def _drop(self, key: Hashable, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _guard(self, key: Hashable, body: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await body()
            except Exception as error:
                self._stats.task_failures += 1
                self._logger.exception(
                    "feed_task_failed", task=str(key), error=type(error).__name__
                )
                await asyncio.sleep(RESTART_S)

    def cancel(self, key: Hashable) -> None:
        """Ask one task to end; a new one may be spawned under its key at once."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel all and wait until they have ended."""
        pending = set(self._tasks.values())
        while pending:
            # Again and again: a library may swallow a cancellation.
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=1.0)
