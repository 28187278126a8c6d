"""Runs the lists of workers (DNS, file, Kubernetes) and hands what they name to the tender."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import structlog

from gateway.config import DiscoveryConfig
from gateway.discovery.base import Listing, ListSource, Source
from gateway.discovery.dns import DnsList
from gateway.discovery.file import FileList
from gateway.discovery.kubernetes import KubernetesList
from gateway.feeds.tasks import TaskSet
from gateway.index.stats import FeedStats


@dataclass(slots=True)
class SourceState:
    """One list, for people."""

    source: Source
    workers: int | None = None
    """How many it names; None: it was never read."""
    fault: str = "not read yet"
    """Why it cannot be read now; empty if it can."""
    told_at: float | None = None
    """When it was read last."""


def make_sources(
    config: DiscoveryConfig,
    *,
    clock: Callable[[], float],
    rng: Random,
    env: Mapping[str, str] | None = None,
) -> list[ListSource]:
    """The configured lists.

    :raises ConfigError: one of them cannot work.
    """
    made: list[ListSource] = []
    if config.dns.urls:
        made.append(DnsList(config.dns, clock))
    if config.file.path:
        made.append(FileList(config.file))
    if config.kubernetes.services:
        made.append(KubernetesList(config.kubernetes, os.environ if env is None else env, rng))
    return made


class FollowedLists:
    """One task for each list. A list that cannot be read changes nothing but its state here."""

    def __init__(
        self,
        take: Callable[[Source, Listing], None],
        stats: FeedStats,
        clock: Callable[[], float],
    ) -> None:
        self._take, self._clock = take, clock
        self._tasks = TaskSet(stats)
        self.states: dict[Source, SourceState] = {}
        self._log: Any = structlog.get_logger("gateway.feeds")

    def start(self, lists: list[ListSource]) -> None:
        """Follow these lists."""
        for one in lists:
            self.states[one.source] = SourceState(one.source)
            self._tasks.spawn(one.source, partial(self._follow, one))

    async def close(self) -> None:
        """Stop following."""
        await self._tasks.close()

    async def _follow(self, one: ListSource) -> None:
        await one.run(partial(self._told, one.source), partial(self._faulty, one.source))

    def _told(self, source: Source, listing: Listing) -> None:
        state = self.states[source]
        if state.workers != len(listing.workers):
            self._log.info("workers_listed", source=str(source), workers=len(listing.workers))
        state.workers, state.told_at = len(listing.workers), self._clock()
        self._take(source, listing)

    def _faulty(self, source: Source, reason: str) -> None:
        state = self.states[source]
        if reason != state.fault:
            if reason:
                kept = state.workers or 0
                self._log.warning(
                    "worker_list_faulty", source=str(source), reason=reason, kept_workers=kept
                )
            else:
                self._log.info("worker_list_read", source=str(source))
        state.fault = reason
