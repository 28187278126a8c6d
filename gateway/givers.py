"""Which worker gave a response: only there a request can go on from it (``previous_response_id``).

Kept here for the newest responses, and for an hour in Redis, where other gateways find it. Redis
may be absent, slow or away: then a gateway knows of the responses that it has passed on itself, and
tells the newest of them once Redis is back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

import xxhash

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


class Givers:
    """Remembers by tenant: nobody is led by another one's response.

    :param link: None: nothing is shared.
    """

    def __init__(self, link: RedisLink | None, keys: RedisKeys, *, rest_s: float = _REST_S) -> None:
        self._link, self._keys, self._rest_s = link, keys, rest_s
        self._known: OrderedDict[str, WorkerId] = OrderedDict()
        self._line: deque[tuple[Command, asyncio.Future[WorkerId | None] | None]] = deque()
        self._work = asyncio.Event()
        self._away = False
        """It failed, and has not answered since. Nobody waits for it then."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to talk to Redis, if there is one."""
        if self._link is not None:
            self._task = asyncio.create_task(self._run(self._link), name="givers")

    async def close(self) -> None:
        """End; who waits for Redis is told nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._drop_questions()

    def gave(self, tenant: str, response: str, worker: WorkerId) -> None:
        """A worker gave this response to this tenant; an empty id is none."""
        if not response:
            return
        mark = _mark(tenant, response)
        self._known[mark] = worker
        self._known.move_to_end(mark)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        if self._task is not None:  # while Redis is away it waits: others are to know it then
            self._ask(("SET", self._keys.gave(mark), worker, "PX", GAVE_TTL_MS), None)

    async def giver(self, tenant: str, response: str) -> WorkerId | None:
        """Who gave it; None: nobody knows."""
        mark = _mark(tenant, response)
        known = self._known.get(mark)
        if known is not None or not self._reachable():
            return known
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
                while self._line:
                    await self._trip(link)
                    while self._away:
                        await asyncio.sleep(self._rest_s)
                        self._away = not await _answers(link)
        finally:
            await link.drop()

    async def _trip(self, link: RedisLink) -> None:
        asked = [self._line.popleft() for _ in range(min(_PER_TRIP, len(self._line)))]
        try:
            replies = await link.call([command for command, _ in asked])
        except RedisLost:
            self._away = True
            self._line.extendleft(reversed(asked))
            self._drop_questions()
            return
        for (_, answer), reply in zip(asked, replies, strict=True):
            found = reply[0] if isinstance(reply, list) else None
            _tell(answer, WorkerId(found.decode()) if isinstance(found, bytes) else None)

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


def _mark(tenant: str, response: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{tenant}\0{response}".encode("utf-8", "surrogatepass"))
