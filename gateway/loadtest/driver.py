"""Drives sessions against an endpoint: closed loop (so many at a time) or open (at a rate).

The client is the gateway's own upstream client, so that it costs little; it watches itself all the
same, and says when it was the bottleneck.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from secrets import token_hex
from typing import Any

import msgspec

from gateway.loadtest.result import Client, Done
from gateway.loadtest.stats import quantile_of
from gateway.loadtest.workloads import Session, Turn
from gateway.upstream import Timeouts, UpstreamError, UpstreamResponse
from gateway.wire.client import WireUpstream
from shared.openai import Usage, read_usage
from shared.sse import SseEventTooLarge, SseParser

TICK_S = 0.02
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who is asked, and how."""

    url: str
    model: str
    headers: tuple[tuple[str, str], ...] = ()
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(5.0, 300.0))


@dataclass(slots=True)
class _Answer:
    begun: float
    text: list[str] = field(default_factory=list)
    first: float | None = None
    last: float = 0.0
    events: int = 0
    usage: Usage | None = None
    error: str = ""

    def take(self, data: str, now: float) -> None:
        if data.strip() == "[DONE]":
            return
        value: Any = msgspec.json.decode(data)
        self.usage = read_usage(value) or self.usage
        if value.get("error"):
            self.error = str(value["error"])[:200]
        for choice in value.get("choices") or ():
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            if piece:
                self.text.append(piece)
                self.events += 1
                self.last = now
                self.first = now if self.first is None else self.first


class Driver:
    """One run. Needs a running event loop."""

    def __init__(self, target: Target, on_done: Callable[[], None] = lambda: None) -> None:
        self._target, self._on_done = target, on_done
        self._http = WireUpstream(verbatim=True)
        self._done: list[Done] = []
        self._begun = 0.0
        self._lags: list[float] = []
        self._nonce, self._sessions = token_hex(4), 0

    async def run(
        self, sessions: Sequence[Session], *, concurrency: int | None, rate: float | None, seed: int
    ) -> tuple[list[Done], float, Client]:
        """All sessions; returns the requests, the seconds it took, and how the client fared.

        :param concurrency: sessions at a time; used where neither ``rate`` nor own times are given.
        :param rate: sessions per second, at exponential gaps.
        """
        self._begun, cpu = time.monotonic(), time.process_time()
        watch = asyncio.create_task(self._watch())
        try:
            if all(session.start_s is not None for session in sessions):
                starts = [session.start_s or 0.0 for session in sessions]
                await self._open(sessions, starts)
            elif rate is not None:
                rng, at, starts = Random(seed), 0.0, []
                for _ in sessions:
                    starts.append(at)
                    at += rng.expovariate(rate)
                await self._open(sessions, starts)
            else:
                await self._closed(sessions, concurrency or 1)
        finally:
            watch.cancel()
            await self._http.close()
        took = time.monotonic() - self._begun
        lag = quantile_of(sorted(self._lags), 0.99).value if self._lags else 0.0
        return self._done, took, Client.of((time.process_time() - cpu) / took, lag)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags.append(max(0.0, loop.time() - due))

    async def _open(self, sessions: Sequence[Session], starts: Sequence[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for session, start in zip(sessions, starts, strict=True):
                await asyncio.sleep(max(0.0, self._begun + start - time.monotonic()))
                group.create_task(self._session(session))

    async def _closed(self, sessions: Sequence[Session], concurrency: int) -> None:
        waiting = iter(sessions)

        async def work() -> None:
            for session in waiting:
                await self._session(session)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def _session(self, session: Session) -> None:
        self._sessions += 1
        name = ("x-headwater-session", f"{self._nonce}-{self._sessions}")
        history: list[dict[str, Any]] = []
        for number, turn in enumerate(session.turns):
            if number and turn.think_s:
                await asyncio.sleep(turn.think_s)
            history += turn.messages
            answer = await self._ask(turn, history, name)
            if answer is None:
                return  # the conversation cannot go on
            history.append({"role": "assistant", "content": answer})

    async def _ask(
        self, turn: Turn, history: list[dict[str, Any]], name: tuple[str, str]
    ) -> str | None:
        body: dict[str, Any] = {
            "model": self._target.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": turn.max_tokens,
        }
        body |= {"prompt": turn.prompt} if turn.prompt else {"messages": history}
        answer, worker = _Answer(time.monotonic()), ""
        try:
            async with self._http.open(
                self._target.url,
                COMPLETIONS if turn.prompt else CHAT,
                [("Content-Type", "application/json"), name, *self._target.headers],
                msgspec.json.encode(body),
                timeouts=self._target.timeouts,
            ) as response:
                worker = _worker(response)
                await _read(response, answer)
        except (UpstreamError, SseEventTooLarge, msgspec.DecodeError, RecursionError) as error:
            answer.error = answer.error or str(error)
        self._keep(answer, worker)
        return None if answer.error else "".join(answer.text)

    def _keep(self, answer: _Answer, worker: str) -> None:
        now, usage = time.monotonic(), answer.usage
        spread = answer.last - answer.first if answer.first is not None else 0.0
        self._done.append(
            Done(
                at=answer.begun - self._begun,
                ttft_s=None if answer.first is None else answer.first - answer.begun,
                total_s=now - answer.begun,
                itl_s=spread / (answer.events - 1) if answer.events > 1 else None,
                prompt_tokens=0 if usage is None else usage.prompt,
                cached_tokens=0 if usage is None or usage.cached is None else usage.cached,
                reported=usage is not None and usage.cached is not None,
                output_tokens=answer.events if usage is None else usage.completion,
                worker=worker,
                error=answer.error,
            )
        )
        self._on_done()


def _worker(response: UpstreamResponse) -> str:
    return next((v for k, v in response.headers if k.lower() == "x-headwater-worker"), "")


async def _read(response: UpstreamResponse, answer: _Answer) -> None:
    if response.status != 200:
        answer.error = f"status {response.status}: {(await response.read())[:_ERROR_BYTES]!r}"
        return
    parser = SseParser()
    while data := await response.read():
        now = time.monotonic()
        for event in parser.feed(data):
            if event.data:
                answer.take(event.data, now)
    if answer.first is None and not answer.error and answer.usage is None:
        answer.error = "the answer ended without content"
