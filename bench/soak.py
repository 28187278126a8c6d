"""A gateway under 70 % load for long, with light faults: what it holds must stop growing.

    python -P bench/soak.py [--minutes 60] [--every-s 10]

Two workers without a model, Redis and a gateway as processes. What the cluster can serve is
measured first; then 70 % of that is asked for. Meanwhile clients leave in the middle, all keys of
Redis vanish, and a worker is killed and started again, in turn, one of them every half minute.
Prints memory, file descriptors and Redis keys at each sample. Exit code 1 if the median of the
last quarter is more than 5 % above that of the quarter before (descriptors and keys: and by more
than eight), or a request was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

import aiohttp  # noqa: E402
from caserig import GatewayProcess  # noqa: E402
from chaoslab import CHAT, PATIENT, Load, body_of, read, recovers, start_again  # noqa: E402
from livelab import Lab, lab  # noqa: E402
from redisrig import talk  # noqa: E402

SHARE = 0.7
CLIENTS = 8
MEASURE_S = 8.0
FAULT_EVERY_S = 30.0
MORE = 0.05
FEW = 8
NAMES = ("rss_mib", "fds", "redis_keys", "in_flight")


async def capacity(url: str, seconds: float) -> float:
    """Requests per second that ``CLIENTS`` get answered, each asking without a pause."""
    ends, done = time.monotonic() + seconds, 0

    async def client(number: int) -> None:
        nonlocal done
        rng = random.Random(number)
        while time.monotonic() < ends:
            body = body_of(rng, stream=rng.random() < 0.5)
            async with session.post(f"{url}{CHAT}", json=body) as reply:
                await reply.read()
            done += 1

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return done / seconds


class Faults:
    """Light ones, in turn."""

    def __init__(self, bench: Lab, gateway: GatewayProcess) -> None:
        self.bench, self.gateway = bench, gateway
        self.until = 0.0
        self.done = 0

    def excused(self, stream: bool, outcome: str) -> bool:
        """A stream whose worker was killed cannot be finished."""
        return stream and time.monotonic() < self.until

    async def run(self) -> None:
        """For ever."""
        rng = random.Random(5)
        while True:
            for fault in (self._leave, self._flush, self._kill):
                await asyncio.sleep(FAULT_EVERY_S)
                await fault(rng)
                self.done += 1

    async def _leave(self, rng: random.Random) -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(20):
                body = body_of(rng, stream=True, tokens=500)
                async with session.post(f"{self.gateway.url}{CHAT}", json=body) as reply:
                    await reply.content.read(100)  # leaving the block closes the connection

    async def _flush(self, rng: random.Random) -> None:
        await asyncio.to_thread(talk, self.bench.redis.port, "FLUSHALL")

    async def _kill(self, rng: random.Random) -> None:
        worker = rng.choice(self.bench.workers)
        self.until = float("inf")
        worker.process.kill()
        await asyncio.to_thread(worker.process.wait)
        start_again(self.bench, worker)
        await recovers(self.gateway, len(self.bench.workers))
        self.until = time.monotonic() + 2.0


def sample(bench: Lab, gateway: GatewayProcess) -> tuple[float, ...]:
    """In the order of ``NAMES``."""
    now = read(gateway)
    return (now.rss_mib, now.fds, float(talk(bench.redis.port, "DBSIZE")), now.inflight)


def growth(samples: Sequence[tuple[float, ...]]) -> list[str]:
    """What was larger in the last quarter than in the one before. Pure."""
    quarter = len(samples) // 4
    if not quarter:
        return ["fewer than four samples"]
    found = []
    for place, name in enumerate(NAMES[:3]):
        before, last = (
            statistics.median(each[place] for each in part)
            for part in (samples[-2 * quarter : -quarter], samples[-quarter:])
        )
        print(f"{name}: {before:.1f} -> {last:.1f} ({last / max(before, 1e-9) - 1:+.1%})")
        if last > before * (1 + MORE) and (name == "rss_mib" or last > before + FEW):
            found.append(f"{name} grows: {before:.1f}, then {last:.1f}")
    return found


async def run(bench: Lab, options: argparse.Namespace) -> bool:
    """All of it; whether all was well."""
    env = {**PATIENT, "HEADWATER_LEDGER__DIR": str(bench.folder / "ledger")}
    gateway = await asyncio.to_thread(lambda: bench.launch_gateway(redis=bench.redis.url, env=env))
    await recovers(gateway, len(bench.workers))
    await capacity(gateway.url, MEASURE_S / 4)
    per_s = SHARE * await capacity(gateway.url, MEASURE_S)
    print(f"{per_s:.1f} requests per second", flush=True)
    print("seconds", *NAMES, "requests", sep="\t")
    faults = Faults(bench, gateway)
    load = Load(lambda: gateway.url, per_s, faults.excused)
    tasks = [asyncio.create_task(load.run()), asyncio.create_task(faults.run())]
    begun, samples = time.monotonic(), []
    while time.monotonic() - begun < options.minutes * 60:
        await asyncio.sleep(options.every_s)
        samples.append(await asyncio.to_thread(sample, bench, gateway))
        shown = (f"{value:.1f}" for value in samples[-1])
        at = f"{time.monotonic() - begun:.0f}"
        print(at, *shown, load.counts["requests"], sep="\t", flush=True)
    tasks[1].cancel()
    load.ends = True
    await tasks[0]
    found = growth(samples) + load.lost[:20]
    for line in found:
        print(f"FAULT {line}")
    print(f"{faults.done} faults,", dict(load.counts))
    return not found


async def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    options = parser.parse_args()
    async with lab(2, lambda server: server.url) as bench:
        return 0 if await run(bench, options) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
