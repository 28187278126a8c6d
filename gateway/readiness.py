"""When a gateway is ready, what it lacks, and what does not work as well as it could."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.app import Readiness
from gateway.feeds import Feeds
from gateway.prompts import Prompts
from gateway.router import Router
from gateway.tenancy import shared_caches
from gateway.trust import mistrust

POLL_S = 0.02
"""How often workers are looked for at the start."""
TOKENIZER_S = 10.0
"""How long the first ``ready`` waits for tokenizers that are being loaded."""


class ReadyWatch:
    """Asks router, feeds and prompts. Workers decide; Redis and tokenizers are only told about."""

    def __init__(self, router: Router, feeds: Feeds, prompts: Prompts) -> None:
        self._router, self._feeds, self._prompts = router, feeds, prompts
        self.config_notes: Callable[[], Sequence[str]] = tuple
        """What is to be told about the configuration."""

    def look(self, *, isolating: bool) -> Readiness:
        """As it is now. ``isolating``: tenants share no cache."""
        ready, reasons = self._able()
        notes: list[str] = []
        (notes if ready else reasons).extend(self._feeds.strangers())
        stats, lists = self._feeds.stats, self._feeds.lists()
        if stats.redis_configured and not stats.redis_up:
            notes.append(f"redis is not used: {stats.redis_reason or 'not connected yet'}")
        notes += [f"discovery.{one.source}: {one.fault}" for one in lists if one.fault]
        notes.extend(self.config_notes())
        workers = self._router.workers(time.monotonic())
        notes.extend(mistrust(workers))
        if isolating:
            notes.extend(shared_caches(workers))
        notes.extend(self._about_prompts(isolating=isolating))
        return Readiness(ready, reasons, notes)

    def _able(self) -> tuple[bool, list[str]]:
        """Whether some worker can take a request and the others had time to say the same."""
        able, reasons = self._router.ready()
        if able and (awaited := self._feeds.awaited()):
            return False, [f"worker {url}: its first probe is under way" for url in awaited]
        return able, reasons

    def _about_prompts(self, *, isolating: bool) -> list[str]:
        notes: list[str] = []
        for model in self._router.models():
            profile = self._router.profile(model)
            if profile is None or profile.adapter:
                continue  # an adapter has its model's tokenizer
            missing = self._prompts.missing(profile)
            if missing is not None:
                notes.append(f"{model}: {missing}")
            if isolating:
                notes += [f"{model}: {fault}" for fault in self._prompts.unshared(profile)]
        return notes

    async def until_ready(self) -> None:
        """Wait for workers that can take requests, and a moment for their tokenizers."""
        while not self._able()[0]:  # noqa: ASYNC110 - the router is pure: it can be asked only
            await asyncio.sleep(POLL_S)
        for model in self._router.models():
            profile = self._router.profile(model)
            if profile is not None:
                self._prompts.want(profile)
        await self._prompts.settled(TOKENIZER_S)
