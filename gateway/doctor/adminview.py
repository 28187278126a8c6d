"""What a running gateway sees, through its admin listener."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import msgspec

from gateway.config import GatewayConfig
from gateway.decision import WorkerStatus
from gateway.discovery.base import address_of, worker_url
from gateway.doctor.checks import Finding, Status, finding
from gateway.feeds.sources import SourceState
from shared.errors import ConfigError

ANSWER_S = 10.0
RANKS = {"exact": 2, "learned": 1, "blind": 0}


class SeenThere(msgspec.Struct, frozen=True):
    """One worker of ``GET /admin/workers``; what else there is, is not looked at."""

    id: str
    url: str
    state: str = ""
    reason: str = ""
    trust: str = ""
    trust_reason: str = ""


class _Listed(msgspec.Struct, frozen=True):
    workers: list[SeenThere]
    lists: list[SourceState] = []


class GatewayView:
    """One running gateway.

    :raises ConfigError: the URL is none.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = worker_url("--url", url)
        self._token = token
        self._seen: list[SeenThere] = []
        self._reached = False

    @property
    def subject(self) -> str:
        """How it is called in findings."""
        return f"gateway {address_of(self._url)}"

    async def look(self) -> list[Finding]:
        """Ask it for its workers."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as client:
                answer = await client.get(f"{self._url}/admin/workers", headers=headers)
            if not answer.is_success:
                return [self._unreachable(f"it answered {answer.status_code}")]
            self._seen = msgspec.json.decode(answer.content, type=_Listed).workers
        except httpx.HTTPError as error:
            return [self._unreachable(str(error) or type(error).__name__)]
        except (msgspec.DecodeError, RecursionError) as error:
            return [self._unreachable(f"this is no admin listener: {error}")]
        self._reached = True
        detail = f"it knows {len(self._seen)} workers"
        return [finding("gateway.reachable", self.subject, Status.OK, detail)]

    def _unreachable(self, detail: str) -> Finding:
        return finding("gateway.reachable", self.subject, Status.FAILED, detail)

    def with_workers(self, config: GatewayConfig) -> GatewayConfig:
        """The configuration with the workers that it knows in the static list."""
        known = {address_of(url) for url in config.workers.urls}
        urls = list(config.workers.urls)
        for worker in self._seen:
            try:
                url = worker_url("url", worker.url)
            except ConfigError:
                continue
            if address_of(url) not in known:
                known.add(address_of(url))
                urls.append(url)
        workers = msgspec.structs.replace(config.workers, urls=tuple(urls))
        return msgspec.structs.replace(config, workers=workers)

    def compare(self, workers: Sequence[WorkerStatus]) -> list[Finding]:
        """Where it sees less than was seen from here."""
        if not self._reached:
            return []
        there = {worker.id: worker for worker in self._seen}
        found = []
        for here in workers:
            seen = there.get(here.id)
            subject = f"{self.subject} on {here.id}"
            if seen is None:
                detail = "it does not know this worker"
                found.append(finding("gateway.view", subject, Status.WARNING, detail))
            elif seen.state != here.state.value:
                kind = Status.FAILED if seen.state == "down" else Status.WARNING
                detail = f"{seen.state} there ({seen.reason}), {here.state} from here"
                found.append(finding("gateway.view", subject, kind, detail))
            elif RANKS.get(seen.trust, 0) < RANKS[here.trust.value]:
                detail = f"{seen.trust} there ({seen.trust_reason}), {here.trust} from here"
                found.append(finding("gateway.view", subject, Status.WARNING, detail))
        if not found:
            detail = "the same states and trust as from here"
            found.append(finding("gateway.view", self.subject, Status.OK, detail))
        return found
