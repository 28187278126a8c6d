"""The checks of Redis: reachable, new enough, keeping what it is given, allowed, quick."""

from __future__ import annotations

import time
from secrets import token_hex
from statistics import median
from typing import Any

from redis.exceptions import ResponseError

from gateway.config import GatewayConfig
from gateway.discovery.redis import RedisDiscovery
from gateway.doctor.checks import Finding, Status, finding
from gateway.index.redis import is_replica
from shared import redisurl
from shared.rediskeys import Command, RedisKeys
from shared.redislink import RedisLink, RedisLost

OLDEST = (6, 2)
CALLS = 20
SLOW_S = 0.005
GOOD_POLICIES = ("noeviction", "volatile-ttl")


async def examine_redis(config: GatewayConfig) -> list[Finding]:
    """All findings about the configured server."""
    url = config.redis.url
    subject = f"redis {redisurl.shown(url)}"
    if url == "none":
        detail = "none is configured: gateways do not share bookings, workers cannot register"
        return [finding("redis.reachable", "redis", Status.SKIPPED, detail)]
    link = RedisLink(url, config.redis.timeout_ms / 1000)
    try:
        return await _examine(link, config, subject)
    except RedisLost as error:
        detail = str(error)
        wrong_user = "Auth" in detail or "WRONGPASS" in detail
        fix = "correct the user and password in [redis] url" if wrong_user else None
        return [finding("redis.reachable", subject, Status.FAILED, detail, fix)]
    finally:
        await link.drop()


async def _examine(link: RedisLink, config: GatewayConfig, subject: str) -> list[Finding]:
    [role] = await link.call([("ROLE",)])
    fault = ""
    if is_replica(role) and not link.cluster:
        fault = "it is a replica: writes are refused"
    shape = "as a Cluster" if link.cluster else "as a master"
    found = [
        finding("redis.reachable", subject, Status.FAILED, fault)
        if fault
        else finding("redis.reachable", subject, Status.OK, f"it answers, {shape}")
    ]
    [server] = await link.call([("INFO",)])
    info = parse_info(server)
    found += [version(info, subject), await _memory(link, info, subject)]
    found.append(await _latency(link, config, subject))
    if not fault:
        found.append(await _rights(link, config, subject))
        found.append(await _keyspace(link, config, subject))
    return found


def parse_info(reply: Any) -> dict[str, str]:
    """``INFO`` as a table; empty for an error."""
    if not isinstance(reply, bytes):
        return {}
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def version(info: dict[str, str], subject: str) -> Finding:
    """Old enough to lack a command?"""
    if "valkey_version" in info:
        return finding("redis.version", subject, Status.OK, f"Valkey {info['valkey_version']}")
    text = info.get("redis_version", "")
    try:
        number = tuple(int(part) for part in text.split(".")[:2])
    except ValueError:
        number = ()
    if not number:
        return finding("redis.version", subject, Status.SKIPPED, "INFO does not tell it")
    status = Status.OK if number >= OLDEST else Status.FAILED
    return finding("redis.version", subject, status, f"Redis {text}")


async def _memory(link: RedisLink, info: dict[str, str], subject: str) -> Finding:
    policy = info.get("maxmemory_policy", "")
    limit = info.get("maxmemory", "")
    if not policy:
        return finding("redis.memory", subject, Status.SKIPPED, "INFO does not tell the policy")
    detail = f"maxmemory-policy {policy}, maxmemory {limit or '?'}"
    if limit == "0":
        return finding("redis.memory", subject, Status.OK, f"{detail} (no limit)")
    if policy in GOOD_POLICIES:
        return finding("redis.memory", subject, Status.OK, detail)
    return finding("redis.memory", subject, Status.WARNING, f"{detail}: registrations may vanish")


async def _latency(link: RedisLink, config: GatewayConfig, subject: str) -> Finding:
    taken = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        await link.call([("TIME",)])
        taken.append(time.perf_counter() - begun)
    typical, worst = median(taken), max(taken)
    detail = f"{typical * 1e3:.2f} ms, at worst {worst * 1e3:.1f} ms of {CALLS}"
    # a look-up never waits for Redis; what is slow is how soon gateways know of each other's work
    status = Status.WARNING if typical > min(SLOW_S, config.redis.timeout_ms / 2e3) else Status.OK
    return finding("redis.latency", subject, status, detail)


def trial_commands(keys: RedisKeys, name: str) -> list[Command]:
    """Each command that a gateway uses, on keys that vanish by themselves."""
    base = keys.bookings(f"doctor-{name}")
    text, table, group, stream = (f"{base}:{kind}" for kind in ("s", "h", "g", "x"))
    life = "PEXPIRE"
    short = 2000
    return [
        ("TIME",),
        ("ROLE",),
        ("SET", text, b"1", "PX", short),
        ("MGET", text),
        ("PTTL", text),
        ("HGETALL", table),
        ("HMGET", table, "a"),
        ("SADD", group, "a"),
        (life, group, short),
        ("SMEMBERS", group),
        ("SREM", group, "a"),
        ("XADD", stream, "MAXLEN", "~", 10, "*", "b", b"1"),
        (life, stream, short),
        ("XREAD", "COUNT", 1, "STREAMS", stream, "0"),
        ("XINFO", "STREAM", stream),
    ]


async def _rights(link: RedisLink, config: GatewayConfig, subject: str) -> Finding:
    commands = trial_commands(RedisKeys(config.deployment.name), token_hex(4))
    replies = await link.call(commands)
    refused: dict[str, str] = {}
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, ResponseError):
            refused.setdefault(str(command[0]), " ".join(str(reply).split()))
    if not refused:
        return finding("redis.rights", subject, Status.OK, "all commands are allowed")
    first = next(iter(refused.values()))
    detail = f"refused: {', '.join(refused)} ({first[:160]})"
    if "NOPERM" in first or "permission" in first.lower():
        return finding("redis.rights", subject, Status.FAILED, detail)
    return finding("redis.rights", subject, Status.FAILED, detail, "see the server's own words")


async def _keyspace(link: RedisLink, config: GatewayConfig, subject: str) -> Finding:
    look = await RedisDiscovery(RedisKeys(config.deployment.name)).look(link)
    name = config.deployment.name
    if look.unreadable:
        worker, reason = next(iter(look.unreadable.items()))
        number = len(look.unreadable)
        detail = f"{number} registrations under '{name}' cannot be read ({worker}: {reason})"
        fix = "run the same version of headwater on gateways and workers"
        return finding("redis.keyspace", subject, Status.FAILED, detail, fix)
    alive = ", ".join(sorted(look.sightings)) or "nobody"
    detail = f"deployment '{name}': {len(look.sightings)} workers have a lease ({alive[:200]})"
    return finding("redis.keyspace", subject, Status.OK, detail)
