"""Which worker gave a response: only there a request can go on from it (``previous_response_id``).

Kept here for the newest responses, and for an hour in Redis, where other gateways find it. Redis
may be absent, slow or away: then a gateway knows of the responses that it has passed on itself, and
tells the newest of them once Redis is back. A Redis that has lost what it was told (flushed,
evicted, restarted, a replica that was behind) is told all of it again: each gateway looks after the
newest that it has told.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice

import xxhash

from gateway.ticks import tick
from shared.rediskeys import GAVE_TTL_MS, Command, RedisKeys
from shared.redislink import RedisLink, RedisLost
from shared.types import WorkerId

KEPT = 65_536
"""Responses known here."""
_PER_TRIP = 200
_WAITING = 4096
"""Commands that may wait for Redis; the oldest are dropped."""
_WAIT_S = 0.5
"""How long a request waits for what Redis says."""
_REST_S = 1.0
"""Between looks at a Redis that failed."""
_LOOK_S = 2.0
"""Between looks whether it still has what it was told."""
_LOOKED_AT = 16
"""Of the newest: so few that a look costs nothing, so many that they lie on all of its servers."""
_AGAIN_REST_S = 16.0
"""Between two times at which all is told again: a Redis that evicts would be told for ever."""


class Givers:
    """Remembers by tenant: nobody is led by another one's response.

    :param link: None: nothing is shared.
    """

    def __init__(
        self,
        link: RedisLink | None,
        keys: RedisKeys,
        *,
        rest_s: float = _REST_S,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link, self._keys, self._rest_s, self._look_s = link, keys, rest_s, look_s
        self._clock = clock
        self._known: OrderedDict[str, tuple[WorkerId, float]] = OrderedDict()
        """By mark: who gave it, and when."""
        self._line: deque[tuple[Command, asyncio.Future[WorkerId | None] | None]] = deque()
        self._work = asyncio.Event()
        self._away = False
        """It failed, and has not answered since. Nobody waits for it then."""
        self._again: deque[Command] = deque()
        """What is told once more, behind all that waits."""
        self._told_again = -_AGAIN_REST_S
        self._look = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to talk to Redis, if there is one."""
        if self._link is not None:
            self._task = asyncio.create_task(self._run(self._link), name="givers")
            self._timer = asyncio.create_task(self._look_again(), name="givers look")

    async def close(self) -> None:
        """End; who waits for Redis is told nothing."""
        tasks = [task for task in (self._task, self._timer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._drop_questions()

    def gave(self, tenant: str, response: str, worker: WorkerId) -> None:
        """A worker gave this response to this tenant; an empty id is none."""
        if not response:
            return
        mark = _mark(tenant, response)
        self._known[mark] = worker, self._clock()
        self._known.move_to_end(mark)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        if self._task is not None:  # while Redis is away it waits: others are to know it then
            self._ask(self._telling(mark, worker, GAVE_TTL_MS), None)

    async def giver(self, tenant: str, response: str) -> WorkerId | None:
        """Who gave it; None: nobody knows."""
        mark = _mark(tenant, response)
        known = self._known.get(mark)
        if known is not None:
            return known[0]
        if not self._reachable():
            return None
        answer: asyncio.Future[WorkerId | None] = asyncio.get_running_loop().create_future()
        self._ask(("MGET", self._keys.gave(mark)), answer)
        await asyncio.wait((answer,), timeout=_WAIT_S)
        return answer.result() if answer.done() and not answer.cancelled() else None

    def _reachable(self) -> bool:
        return self._task is not None and not self._away

    def _ask(self, command: Command, answer: asyncio.Future[WorkerId | None] | None) -> None:
        if len(self._line) >= _WAITING:
            _tell(self._line.popleft()[1], None)
        self._line.append((command, answer))
        self._work.set()

    async def _run(self, link: RedisLink) -> None:
        """Owns the link. Never returns."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._line or self._again or self._look or self._away:
                    if self._away:
                        await asyncio.sleep(self._rest_s)
                        self._away, self._look = not await _answers(link), True
                    elif self._line or self._again:
                        await self._trip(link)
                    else:
                        await self._look_after(link)
        finally:
            await link.drop()

    async def _look_again(self) -> None:
        while True:
            await tick(self._look_s)
            if self._known:
                self._look = True
                self._work.set()

    async def _look_after(self, link: RedisLink) -> None:
        """Whether the newest that have been told are still there; else all are told again."""
        now, self._look = self._clock(), False
        if now - self._told_again < _AGAIN_REST_S:
            return
        lasting = (each for each in reversed(self._known.items()) if _lasts_ms(each[1][1], now))
        newest = [mark for mark, _ in islice(lasting, _LOOKED_AT)]
        if not newest:
            return
        try:
            there = await link.call([("EXISTS", self._keys.gave(mark)) for mark in newest])
        except RedisLost:
            self._lose()
            return
        if 0 in there:
            self._told_again = now
            for mark, (worker, at) in self._known.items():
                if lasts_ms := _lasts_ms(at, now):
                    self._again.append(self._telling(mark, worker, lasts_ms))

    def _telling(self, mark: str, worker: WorkerId, lasts_ms: int) -> Command:
        return ("SET", self._keys.gave(mark), worker, "PX", lasts_ms)

    async def _trip(self, link: RedisLink) -> None:
        asked = [self._line.popleft() for _ in range(min(_PER_TRIP, len(self._line)))]
        again = min(_PER_TRIP - len(asked), len(self._again))
        asked += [(self._again.popleft(), None) for _ in range(again)]
        try:
            replies = await link.call([command for command, _ in asked])
        except RedisLost:
            self._line.extendleft(reversed(asked))
            self._lose()
            return
        for (_, answer), reply in zip(asked, replies, strict=True):
            found = reply[0] if isinstance(reply, list) else None
            _tell(answer, WorkerId(found.decode()) if isinstance(found, bytes) else None)

    def _lose(self) -> None:
        self._away = True
        self._drop_questions()

    def _drop_questions(self) -> None:
        """Nobody waits for an answer any more; the newest of what is to be told stays."""
        for _, answer in self._line:
            _tell(answer, None)
        news = [each for each in self._line if each[1] is None]
        self._line = deque(news[-_WAITING:])


async def _answers(link: RedisLink) -> bool:
    try:
        await link.call([("PING",)])
    except RedisLost:
        return False
    return True


def _tell(answer: asyncio.Future[WorkerId | None] | None, worker: WorkerId | None) -> None:
    if answer is not None and not answer.done():
        answer.set_result(worker)


def _lasts_ms(told: float, now: float) -> int:
    """How long what was told then is of use from now on; 0: not any more."""
    return max(0, GAVE_TTL_MS - int((now - told) * 1000))


def _mark(tenant: str, response: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{tenant}\0{response}".encode("utf-8", "surrogatepass"))
