"""Redis killed, frozen, flushed, restarted empty and swapped for another, under load.

    python -P bench/redis_faults.py [--workers 2] [--per-s 12] [--fault-s 4]

Prints for each fault: requests, errors, the hit rate before, during and after, the seconds after
Redis was back until the gateway used it again, and until the hit rate was full again (within one
point of the rate before, over windows of a second), and the seconds that a gateway started
afterwards takes, its process included, until it knows all that the workers hold. Exit code 1 if a
request failed or one of the first two took more than 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from livelab import Answer, Lab, RedisServer, Traffic, errors, hit_rate, lab  # noqa: E402
from redisrig import RedisProxy, talk  # noqa: E402

SETTLE_S = 11.0
LIMIT_S = 10.0
POINT = 0.01


async def kill(bench: Lab, proxied: RedisProxy, hold: Callable[[], Awaitable[None]]) -> None:
    """The process dies, and comes back empty after a while."""
    process = bench.redis.process
    assert process is not None
    process.kill()
    process.wait()
    await hold()
    bench.redis.start()


async def freeze(bench: Lab, proxied: RedisProxy, hold: Callable[[], Awaitable[None]]) -> None:
    """SIGSTOP: its connections stay open and nothing is answered."""
    bench.redis.freeze()
    await hold()
    bench.redis.thaw()


async def flush(bench: Lab, proxied: RedisProxy, hold: Callable[[], Awaitable[None]]) -> None:
    """All keys are gone."""
    await asyncio.to_thread(talk, bench.redis.port, "FLUSHALL")


async def restart(bench: Lab, proxied: RedisProxy, hold: Callable[[], Awaitable[None]]) -> None:
    """Stopped in order and started at once, empty."""
    await asyncio.to_thread(bench.redis.stop)
    bench.redis.start()


async def swap(bench: Lab, proxied: RedisProxy, hold: Callable[[], Awaitable[None]]) -> None:
    """Another, empty server takes its place: the old one becomes a replica, nothing is cut."""
    folder = bench.folder / f"other{time.monotonic_ns()}"
    folder.mkdir()
    other, old = RedisServer("oldest", folder), bench.redis
    other.start()
    await asyncio.to_thread(talk, old.port, "REPLICAOF", "127.0.0.1", other.port)
    proxied.target = other.port
    bench.redis = other
    await hold()
    await asyncio.to_thread(old.stop)


FAULTS = {"killed": kill, "frozen": freeze, "flushed": flush, "restarted": restart, "swapped": swap}


def seconds_to_full(answers: list[Answer], back: float, before: float) -> float:
    """From ``back`` until every later window of a second is at the rate before."""
    windows: dict[int, list[Answer]] = {}
    for answer in answers:
        if answer.at >= back:
            windows.setdefault(int(answer.at - back), []).append(answer)
    short = [n for n, some in windows.items() if hit_rate(some) < before - POINT and len(some) > 5]
    return max(short, default=-1) + 1.0


async def one_fault(
    bench: Lab, proxied: RedisProxy, name: str, options: argparse.Namespace
) -> bool:
    """Run one fault under load and print its row; whether it kept the limits."""
    survivor = bench.launch_gateway.gateways[0]
    traffic = Traffic([survivor.url], options.per_s)
    load = asyncio.create_task(traffic.run(3.0 + options.fault_s + SETTLE_S))
    await asyncio.sleep(3.0)
    broken = time.monotonic()

    async def hold() -> None:
        await asyncio.sleep(options.fault_s)

    await FAULTS[name](bench, proxied, hold)
    back = time.monotonic()
    used = await asyncio.to_thread(until_used, survivor)
    await load
    late_s = await asyncio.to_thread(start_late, bench, proxied)
    answers = traffic.answers
    before = [a for a in answers if a.at < broken]
    during = [a for a in answers if broken <= a.at < back]
    after = [a for a in answers if a.at >= back]
    full = seconds_to_full(answers, back, hit_rate(before))
    failed = errors(answers)
    row = (
        *(name, len(answers), len(failed)),
        *(f"{hit_rate(some):.3f}" if some else "-" for some in (before, during, after)),
        *(f"{used:.1f}", f"{full:.0f}", f"{late_s:.1f}"),
        f"{statistics.median(a.seconds for a in answers) * 1e3:.0f}",
    )
    print(*row, sep="\t", flush=True)
    for error in failed[:3]:
        print("   ", error)
    return not failed and max(used, full) <= LIMIT_S


def until_used(gateway: object) -> float:
    """Seconds until the gateway's Redis gauge says 1 and its workers' events come from there."""
    begun = time.monotonic()
    while time.monotonic() - begun < 30:
        metrics = gateway.http.get(f"{gateway.admin}/metrics").text  # type: ignore[attr-defined]
        if "headwater_redis_up 1.0" in metrics:
            return time.monotonic() - begun
        time.sleep(0.05)
    return 30.0


def start_late(bench: Lab, proxied: RedisProxy) -> float:
    """Seconds that a gateway started now takes to know all that the workers hold."""
    begun = time.monotonic()
    late = bench.gateway(proxied.url)
    took = time.monotonic() - begun
    late.stop()
    return took


async def main() -> int:
    """Run all faults; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--per-s", type=float, default=12.0)
    parser.add_argument("--fault-s", type=float, default=4.0)
    parser.add_argument("--faults", default=",".join(FAULTS))
    options = parser.parse_args()
    made: list[RedisProxy] = []

    def through(server: RedisServer) -> str:
        made.append(RedisProxy(server.port))
        return made[0].url

    async with lab(options.workers, through) as bench:
        gateway = await asyncio.to_thread(bench.gateway, made[0].url)
        await Traffic([gateway.url], options.per_s).warm()
        titles = "fault requests errors before during after redis_s full_s late_gateway_s median_ms"
        print(*titles.split(), sep="\t", flush=True)
        good = [
            await one_fault(bench, made[0], name, options) for name in options.faults.split(",")
        ]
        bench.redis.stop()
    made[0].close()
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
