"""Looks after the configuration of a running gateway: SIGHUP, or the file has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from gateway.config import GatewayConfig
from gateway.reload import Changes
from shared.errors import ConfigError

LOOK_EVERY_S = 1.0

Signature = tuple[int, int, int] | None
"""Of the file; None: it cannot be looked at."""


class ConfigWatch:
    """Loads again and hands over. ``fault`` and ``pending`` are for people.

    :param load: reads all sources anew, as at the start; raises ``ConfigError``.
    :param apply: takes over what can be; raises ``ConfigError`` and then changed nothing.
    """

    def __init__(
        self,
        path: Path | None,
        load: Callable[[], GatewayConfig],
        apply: Callable[[GatewayConfig], Awaitable[Changes]],
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._path, self._load, self._apply, self._every_s = path, load, apply, every_s
        self._asked = asyncio.Event()
        self._seen = self._signature()
        self._new: Signature = self._seen
        self.fault = ""
        """Why the present file is not used; empty if it is."""
        self.pending: tuple[str, ...] = ()
        """Keys that a restart would change."""
        self._log: Any = structlog.get_logger("headwater.gateway")

    def ask(self) -> None:
        """SIGHUP."""
        self._asked.set()

    async def run(self) -> None:
        """Look for ever."""
        every_s = None if self._path is None else self._every_s
        while True:
            try:
                async with asyncio.timeout(every_s):
                    await self._asked.wait()
            except TimeoutError:
                if not await asyncio.to_thread(self._has_changed):
                    continue
            self._asked.clear()
            await self.reload()

    async def reload(self) -> None:
        """Read, check, apply, tell."""
        self._seen = await asyncio.to_thread(self._signature)
        try:
            changes = await self._apply(await asyncio.to_thread(self._load))
        except ConfigError as error:
            self.fault = " ".join(str(error).split())
            self._log.error("config_not_reloaded", reason=self.fault)
            return
        self.fault, self.pending = "", changes.pending
        self._log.info(
            "config_reloaded",
            applied=list(changes.applied),
            needs_restart=list(changes.pending),
        )

    def notes(self) -> list[str]:
        """What is to be told about the configuration; empty if it is as it should be."""
        found = [f"the configuration is not the present file's: {self.fault}"] if self.fault else []
        if self.pending:
            found.append(f"changed, and waiting for a restart: {', '.join(self.pending)}")
        return found

    def _signature(self) -> Signature:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _has_changed(self) -> bool:
        """Another file than was read, and the same as at the look before: who writes it is done."""
        before, self._new = self._new, self._signature()
        if self._new == self._seen or self._new != before or self._new is None:
            return False
        self._seen = self._new
        return True
