"""What a tenant may ask, counted once for all gateways that share a Redis.

    enter -> line -> (one write to Redis: what all who wait ask) -> yes | RateLimited
      `-- Redis is away, or slow for once: counted by this gateway alone (or refused, if so wanted)

A script in Redis decides, by Redis' own clock, so that two gateways cannot both let the last one
in. What runs is kept as one number per gateway that this gateway writes anew: a gateway that died
leaks nothing, since numbers that are not renewed count no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

import structlog
from redis.exceptions import NoPermissionError, ResponseError

from gateway.feeds.retrying import Backoff
from gateway.tenancy import Limits, Meters, refusal
from shared.errors import NoCapacity, RateLimited
from shared.rediskeys import Command, RedisKeys, Reply
from shared.redislink import RedisLink, RedisLost

WAIT_S = 0.1
"""A request waits this long for Redis at most, once: then Redis counts as away until it answers."""
REFRESH_S = 2.0
STALE_MS = 7_000
"""A gateway's running requests that were not told again for so long are not counted."""
KEY_TTL_MS = 120_000
"""Longer than any allowance takes to flow back."""
BATCH = 256

ENTER = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local mine, most, rate, tokenrate, tokens = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]),
  tonumber(ARGV[5]), tonumber(ARGV[6])
local all = redis.call('HGETALL', KEYS[1])
local at, used, usedtokens, others, stored = now, 0, 0, 0, 0
for i = 1, #all, 2 do
  local name, value = all[i], all[i + 1]
  if name == 'at' then at = tonumber(value)
  elseif name == 'requests' then used = tonumber(value)
  elseif name == 'tokens' then usedtokens = tonumber(value)
  else
    local count, seen = string.match(value, '^(%d+) (%d+)$')
    if now - tonumber(seen) > tonumber(ARGV[7]) then redis.call('HDEL', KEYS[1], name)
    elseif name == 'g:' .. ARGV[1] then stored = tonumber(count)
    else others = others + tonumber(count) end
  end
end
local running = mine == '' and stored or tonumber(mine)
if now > at then
  used = math.max(0, used - (now - at) / 60000 * rate)
  usedtokens = math.max(0, usedtokens - (now - at) / 60000 * tokenrate)
end
local function over(rate, used, asked)
  if rate <= 0 then return 0 end
  return math.max(0, (used + math.min(asked, math.max(1, rate)) - math.max(1, rate)) / rate * 60)
end
local what, wait = 0, 0
local late, latetokens = over(rate, used, 1), over(tokenrate, usedtokens, tokens)
if most > 0 and running + others >= most then what, wait = 1, 1
elseif late > 1e-6 then what, wait = 2, late
elseif latetokens > 1e-6 then what, wait = 3, latetokens
else
  running = running + 1
  if rate > 0 then used = used + 1 end
  if tokenrate > 0 then usedtokens = usedtokens + tokens end
end
redis.call('HSET', KEYS[1], 'at', string.format('%d', math.max(now, at)),
  'requests', string.format('%.9g', used), 'tokens', string.format('%.12g', usedtokens),
  'g:' .. ARGV[1], running .. ' ' .. string.format('%d', now))
redis.call('PEXPIRE', KEYS[1], ARGV[8])
return {what, string.format('%.6f', wait)}
"""
"""KEYS: the tenant's. ARGV: gateway, its running requests ('' as told before), most at a time,
requests and tokens a minute, tokens asked, ms after which a gateway is not counted, ms to live."""
RUNNING = """
local t = redis.call('TIME')
if redis.call('EXISTS', KEYS[1]) == 1 or ARGV[2] ~= '0' then
  redis.call('HSET', KEYS[1], 'g:' .. ARGV[1],
    ARGV[2] .. ' ' .. string.format('%d', t[1] * 1000 + math.floor(t[2] / 1000)))
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 0
"""
"""What runs at a gateway now. KEYS: the tenant's. ARGV: gateway, running requests, ms to live."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that waits for an answer of Redis."""

    name: str
    limits: Limits
    tokens: int
    answer: asyncio.Future[RateLimited | None]


class Limiter:
    """Lets requests of tenants in, or not.

    :param link: None: every gateway counts for itself.
    :param away: what is done while Redis is: ``open`` counts here, ``closed`` refuses.
    """

    def __init__(
        self,
        meters: Meters,
        link: RedisLink | None,
        keys: RedisKeys,
        gateway_id: str,
        *,
        away: Literal["open", "closed"],
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._meters, self._link, self._keys, self._id = meters, link, keys, gateway_id
        self.away = away
        self._clock, self._rng = clock, rng
        self._log = structlog.get_logger("headwater.limits")
        self._line: list[_Asked] = []
        self._changed: set[str] = set()
        """Tenants of whom Redis does not know what runs here."""
        self._counted: set[str] = set()
        """Tenants that have a limit of what may run, as last seen."""
        self._work = asyncio.Event()
        self._up = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def shared(self) -> bool:
        """Redis counts now."""
        return self._up

    def start(self) -> None:
        """Begin to talk to Redis, if there is one."""
        if self._link is not None:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._run(self._link), name="limits"),
                loop.create_task(self._refresh(), name="limits told again"),
            ]

    async def close(self) -> None:
        """End; who waits is counted here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose()

    async def enter(self, name: str, limits: Limits, tokens: int) -> None:
        """A request begins whose prompt has so many tokens (0 = not known).

        :raises RateLimited: the tenant may not, and the request has not begun.
        :raises NoCapacity: Redis is away, and limits are to close then.
        """
        if self._link is None or not limits.any:
            self._meters.enter(name, limits, tokens, self._clock())
        elif not self._up or not await self._asks(name, limits, tokens):
            if self.away == "closed":
                raise NoCapacity("The limits of this key cannot be checked now.", retry_after_s=1.0)
            self._meters.enter(name, limits, tokens, self._clock())

    def count(self, name: str) -> None:
        """A request begins of a tenant without limits; one that has some when it ends is fine."""
        self._meters.count(name)

    async def _asks(self, name: str, limits: Limits, tokens: int) -> bool:
        """Whether Redis let the request in; False: it does not say. Raises ``RateLimited``."""
        answer: asyncio.Future[RateLimited | None] = asyncio.get_running_loop().create_future()
        self._line.append(_Asked(name, limits, tokens, answer))
        self._work.set()
        try:
            await asyncio.wait((answer,), timeout=WAIT_S)
        except asyncio.CancelledError:
            if not answer.cancel() and not answer.cancelled() and answer.result() is None:
                self.leave(name)
            raise
        if not answer.done():
            answer.cancel()
            self._up = False
        if answer.cancelled():
            return False
        refused = answer.result()
        if refused is not None:
            raise refused
        return True

    def leave(self, name: str) -> None:
        """A request that entered is over."""
        self._meters.leave(name)
        if name in self._counted:
            self._changed.add(name)
            self._work.set()

    async def _run(self, link: RedisLink) -> None:
        backoff = Backoff(self._rng)
        try:
            while True:
                try:
                    await link.call([("PING",)])
                    self._up = True
                    backoff.reset()
                    while True:
                        await self._work.wait()
                        self._work.clear()
                        await self._round(link)
                except RedisLost as error:
                    self._log.warning("limits_not_shared", reason=str(error)[:200])
                    self._lose()
                    await backoff.pause()
        finally:
            await link.drop()

    def _lose(self) -> None:
        """Redis is away: those who wait are counted here."""
        self._up = False
        line, self._line = self._line, []
        for asked in line:
            asked.answer.cancel()

    async def _round(self, link: RedisLink) -> None:
        """One write with all that is to be told and asked, and its answers."""
        line, self._line = self._line[:BATCH], self._line[BATCH:]
        line = [asked for asked in line if not asked.answer.done()]
        told = [name for name in self._changed if name not in {one.name for one in line}]
        told = told[:BATCH]
        self._changed -= {*told, *(asked.name for asked in line)}
        first: set[str] = set()
        commands: list[Command] = [self._tell(name) for name in told]
        for asked in line:
            commands.append(self._ask(asked, again=asked.name in first))
            first.add(asked.name)
        if commands:
            try:
                replies = await link.call(commands)
            except BaseException:
                self._line = line + self._line
                raise
            denied = next((one for one in replies if isinstance(one, NoPermissionError)), None)
            if denied is not None:
                self._line = line + self._line
                raise RedisLost(f"{denied} (docs/redis.md, rights)")
            self._up = True
            for asked, reply in zip(line, replies[len(told) :], strict=True):
                self._answer(asked, reply)
        if self._line or self._changed:
            self._work.set()

    def _answer(self, asked: _Asked, reply: Reply) -> None:
        if isinstance(reply, ResponseError) or not isinstance(reply, list):
            asked.answer.cancel()  # another's key of that name: counted here
            return
        what, wait_s = int(reply[0]), float(reply[1])
        refused = refusal(what, asked.limits, wait_s)
        if refused is None:
            if asked.answer.done():  # it has gone on without: Redis is told what really runs
                self._changed.add(asked.name)
            else:
                self._meters.note(asked.name, asked.limits, asked.tokens, self._clock())
        if asked.limits.concurrent:
            self._counted.add(asked.name)
        if not asked.answer.done():
            asked.answer.set_result(refused)

    def _ask(self, asked: _Asked, *, again: bool) -> Command:
        limits, name = asked.limits, asked.name
        running = "" if again else str(self._meters.running(name))
        key = self._keys.limits(name)
        numbers = (limits.concurrent, limits.requests_per_minute, limits.prompt_tokens_per_minute)
        return (
            *("EVAL", ENTER, 1, key, self._id, running),
            *(*numbers, asked.tokens, STALE_MS, KEY_TTL_MS),
        )

    def _tell(self, name: str) -> Command:
        running = str(self._meters.running(name))
        return ("EVAL", RUNNING, 1, self._keys.limits(name), self._id, running, KEY_TTL_MS)

    async def _refresh(self) -> None:
        """What runs for long is told again, so that it goes on being counted."""
        while True:
            await asyncio.sleep(REFRESH_S)
            still = {name for name in self._counted if self._meters.running(name)}
            self._counted = still
            self._changed |= still
            if still:
                self._work.set()
