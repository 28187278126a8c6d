"""Asks each worker what tokens it makes of the probe prompts, and tells the router the verdict.

Once per incarnation, model and tokenizer. What could not be asked is tried again with growing
pauses, and so is a difference: an engine may be given another template, and its restart not show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import aiohttp
import msgspec
import structlog

from gateway.config import WorkersConfig
from gateway.feeds.base import FedRouter
from gateway.feeds.members import Member, Members
from gateway.feeds.tasks import TaskSet
from gateway.index.stats import FeedStats
from gateway.parity import PROBES, Answer, Finding, Parity, Probe, Verdict, judge
from gateway.parityforms import Ask, Reply, conversation
from gateway.ticks import tick
from shared.load import WorkerInfo
from shared.types import WorkerId

TICK_S = 0.25
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
AT_ONCE = 4
"""Workers that are asked at the same time."""
ENOUGH_SILENT = 3
"""Probe prompts without an answer until the others are spared: texts and a chat were among them."""
NAME_TOKENIZER = "name its tokenizer: [render] tokenizers, model name -> folder or hub id"
PROOF_S = 30.0
"""All probe prompts of one worker."""
BODY_LIMIT = 1 << 20


class OwnTokens(Protocol):
    """The gateway's side of the comparison."""

    def missing(self, info: WorkerInfo) -> str | None:
        """Why this worker's prompts cannot be tokenised here; None if they can. Asking begins to
        load what is needed."""
        ...

    def loading(self, info: WorkerInfo) -> bool:
        """What is missing may be there in a moment."""
        ...

    def bos(self, info: WorkerInfo) -> int | None:
        """Id of the token for the beginning of a text."""
        ...

    async def encode(self, info: WorkerInfo, probe: Probe) -> Answer:
        """Tokens of a probe prompt."""
        ...


@dataclass(slots=True)
class _Proof:
    about: tuple[Any, ...]
    parity: Parity
    again_at: float | None
    pause_s: float


class ParityProber:
    """One proof for each worker; uses the feeds' HTTP session."""

    def __init__(
        self,
        router: FedRouter,
        own: OwnTokens,
        session: aiohttp.ClientSession,
        config: WorkersConfig,
        stats: FeedStats,
        clock: Callable[[], float],
    ) -> None:
        self._router, self._own, self._session = router, own, session
        self._stats, self._clock = stats, clock
        self._headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._timeout = aiohttp.ClientTimeout(
            total=max(5.0, config.health_timeout_s), connect=config.connect_timeout_s
        )
        self._proofs: dict[WorkerId, _Proof] = {}
        self._tasks = TaskSet(stats)
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._log: Any = structlog.get_logger("gateway.feeds")

    async def run(self, members: Members) -> None:
        """Look for workers to be proved, for ever."""
        while True:
            self.tick(members)
            await tick(TICK_S)

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.close()

    def tick(self, members: Members) -> None:
        """Begin the proofs that are due."""
        now = self._clock()
        known = set()
        for member in members:
            info = member.info
            if info is None:
                continue
            known.add(info.id)
            if member.healthy and info.id not in self._tasks and self._due(info, now):
                self._tasks.spawn(info.id, partial(self._prove, member, info))
        for worker in self._proofs.keys() - known:
            del self._proofs[worker]

    def _due(self, info: WorkerInfo, now: float) -> bool:
        if self._own.loading(info):
            return False
        proof = self._proofs.get(info.id)
        if proof is None or proof.about != _about(info):
            return True
        return proof.again_at is not None and now >= proof.again_at

    async def _prove(self, member: Member, info: WorkerInfo) -> None:
        async with self._turn:
            try:
                async with asyncio.timeout(PROOF_S):
                    parity = await self.prove(info)
            except TimeoutError:
                parity = Parity(reason=f"the probe prompts took longer than {PROOF_S:.0f} s")
        if member.info is None or _about(member.info) != _about(info):
            return
        if parity.verdict is Verdict.UNPROVEN and self._own.loading(info):
            return  # Asking has begun to load: nothing is known yet, and will be in a moment.
        self._keep(info, parity)
        self._router.note_parity(info.id, parity, self._clock())

    async def prove(self, info: WorkerInfo) -> Parity:
        """Ask a worker, compare, judge. Any answer of the worker is a value, never an exception."""
        missing = self._own.missing(info)
        if missing is not None:
            return Parity(reason=missing, fix="" if info.tokenizer else NAME_TOKENIZER)
        findings = []
        silent = 0
        for probe in PROBES:
            theirs = await self._ask(info, probe)
            silent += bool(theirs.missing)
            findings.append(Finding(probe, await self._own.encode(info, probe), theirs))
            if silent >= ENOUGH_SILENT:
                break
        return judge(findings, self._own.bos(info))

    async def _ask(self, info: WorkerInfo, probe: Probe) -> Answer:
        talk = conversation(info.engine, info.models[0] if info.models else "", probe)
        try:
            ask = next(talk)
            while True:
                ask = talk.send(await self._post(info.url, ask))
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    async def _post(self, url: str, ask: Ask) -> Reply:
        headers = {"content-type": "application/json", **self._headers}
        try:
            async with self._session.post(
                url + ask.path,
                data=msgspec.json.encode(ask.body),
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > BODY_LIMIT:
                        return Reply(0, reason=f"{ask.path} answered more than {BODY_LIMIT} bytes")
                return Reply(response.status, bytes(body))
        except TimeoutError:
            return Reply(0, reason="no answer in time")
        except aiohttp.ClientError as error:
            return Reply(0, reason=f"{type(error).__name__}: {error}"[:200])

    def _keep(self, info: WorkerInfo, parity: Parity) -> None:
        before = self._proofs.get(info.id)
        about = _about(info)
        pause = FIRST_PAUSE_S
        if before is not None and before.about == about:
            pause = min(LONGEST_PAUSE_S, 2 * before.pause_s)
        again_at = None if parity.verdict is Verdict.EQUAL else self._clock() + pause
        self._proofs[info.id] = _Proof(about, parity, again_at, pause)
        if before is not None and before.parity == parity and before.about == about:
            return
        tell = self._log.warning if parity.verdict is Verdict.DIFFERENT else self._log.info
        tell(
            "worker_parity",
            worker=info.id,
            parity=str(parity.verdict),
            reason=parity.reason,
            fix=parity.fix,
        )


def _about(info: WorkerInfo) -> tuple[Any, ...]:
    """What a proof is good for."""
    return (info.epoch, info.engine, info.url, info.models[:1], info.tokenizer)
