"""A gateway under 70 % load for long, with light faults: what it holds must stop growing.

    python -P bench/soak.py [--minutes 60] [--every-s 10] [--kv-blocks 4096] [--keep FOLDER]

Two workers without a model, Redis and a gateway as processes. What the cluster can serve is
measured first; then 70 % of that is asked for. Meanwhile clients leave in the middle, all keys of
Redis vanish, and a worker is killed and started again, in turn, one of them every half minute.
Prints memory, file descriptors and Redis keys at each sample, when each fault was, and for each
lost request the name under which the ledger has it (``cid``; see ``--keep``).

What is bounded fills up in the course of hours with the default settings: pieces of text and their
tokens (``[render] cache_mib``, 64 MiB, some 7 KB for each of these prompts), keys of prompts seen
(``[routing] ghost_blocks``, a million of 70 bytes), and the index, up to what workers hold. Here
all of it is so small that it is full within the first round of faults, so that whatever still grows
after that has no bound.

What is held swings with the faults (a restarted worker has checkpoints under its former and its
present epoch for a minute; a flush takes them all), so only whole rounds of all faults are compared
with each other: the last quarter of them, one round at least, with as many before. Exit code 1 if
the median of memory or descriptors, or the most keys, is more than 5 % above that of the rounds
before (descriptors and keys: and by more than eight); if a key has no time to live, or belongs to
nothing that is there (but for a former epoch's checkpoint that will expire); or a request was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

import aiohttp  # noqa: E402
import redis  # noqa: E402
from caserig import GatewayProcess  # noqa: E402
from chaoslab import CHAT, PATIENT, Load, body_of, read, recovers, start_again  # noqa: E402
from livelab import Lab, lab  # noqa: E402
from redisrig import talk  # noqa: E402

SHARE = 0.7
CLIENTS = 8
MOST = 3 * CLIENTS
"""Requests without an answer at a time. What a machine can serve changes with what else it does,
and one worker of two can serve but half: asked for more than that for long, any queue outlasts
any client. One that had to be held back for this is counted as ``held``; what was sent must be
answered as ever."""
MEASURE_S = 8.0
FAULT_EVERY_S = 30.0
MORE = 0.05
FEW = 8
SMALL_GATEWAY = {"HEADWATER_RENDER__CACHE_MIB": "4", "HEADWATER_ROUTING__GHOST_BLOCKS": "5000"}
KV_BLOCKS = 4096
"""Of each worker: some hundred answers fill them, and blocks are evicted from then on."""
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

    def __init__(self, bench: Lab, gateway: GatewayProcess, workers: Mapping[str, str]) -> None:
        """``workers``: what each of them is started with."""
        self.bench, self.gateway, self.workers = bench, gateway, workers
        self.until = 0.0
        self.done = 0
        self.rounds: list[float] = []
        """When each round of all faults began."""

    def excused(self, stream: bool, outcome: str) -> bool:
        """A stream whose worker was killed cannot be finished."""
        return stream and time.monotonic() < self.until

    async def run(self) -> None:
        """For ever."""
        rng = random.Random(5)
        while True:
            self.rounds.append(time.monotonic())
            for fault in (self._leave, self._flush, self._kill):
                await asyncio.sleep(FAULT_EVERY_S)
                begun = time.time()
                await fault(rng)
                self.done += 1
                print(f"# {fault.__name__} from {begun:.1f} to {time.time():.1f}", flush=True)

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
        start_again(self.bench, worker, self.workers)
        await recovers(self.gateway, len(self.bench.workers))
        self.until = time.monotonic() + 2.0


@dataclass(frozen=True)
class Sample:
    """What was held at a moment."""

    at: float
    rss_mib: float
    fds: float
    redis_keys: float
    in_flight: float


def sample(bench: Lab, gateway: GatewayProcess) -> tuple[Sample, list[str]]:
    """What is held now, and the keys that should not be."""
    now = read(gateway)
    with redis.Redis(port=bench.redis.port, socket_timeout=5) as client:
        names = sorted(client.scan_iter(count=1000))
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.pttl(name)
        lives = {name.decode(): ms for name, ms in zip(names, pipeline.execute(), strict=True)}
    workers = {worker.url.removeprefix("http://") for worker in bench.workers}
    held = Sample(time.monotonic(), now.rss_mib, now.fds, float(len(lives)), now.inflight)
    return held, strays(lives, workers)


def strays(lives: Mapping[str, int], workers: Collection[str]) -> list[str]:
    """Keys that would stay for ever, or that no worker and no gateway of now can have. Pure.

    :param lives: key -> milliseconds to live, -1 for ever, -2 it has just gone.
    """
    found = [f"{name} has no time to live" for name, ms in lives.items() if ms == -1]
    places = "|".join(re.escape(worker) for worker in workers)
    known = re.compile(
        rf"hw:{{headwater\.\d+}}:(members|log|learned|w:({places})|ck:({places}):\d+:(m|h?\d+))"
        r"|hw:{headwater\.g}:(drains|gateways|ledger|(load|offered):[\w-]+)"
        r"|hw:{headwater\.t\.[\w.-]+}:limits|hw:{headwater\.r\.[0-9a-f]{2}}:gave:[0-9a-f]+"
    )
    return found + [f"{name} belongs to nothing" for name in lives if not known.fullmatch(name)]


def growth(samples: Sequence[Sample], rounds: Sequence[float]) -> list[str]:
    """What was larger in the last rounds of faults than in as many before. Pure."""
    many = max(1, (len(rounds) - 1) // 4)
    if len(rounds) < 2 * many + 1:
        return [f"too short to tell: {max(0, len(rounds) - 1)} whole rounds of faults, not two"]
    first, middle, end = rounds[-2 * many - 1], rounds[-many - 1], rounds[-1]
    before = [each for each in samples if first <= each.at < middle]
    last = [each for each in samples if middle <= each.at < end]
    if not before or not last:
        return ["too few samples"]
    found = []
    for name, of in (("rss_mib", median), ("fds", median), ("redis_keys", max)):
        then, now = (of(getattr(each, name) for each in part) for part in (before, last))
        print(f"{name}: {then:.1f} -> {now:.1f} ({now / max(then, 1e-9) - 1:+.1%})")
        if now > then * (1 + MORE) and (name == "rss_mib" or now > then + FEW):
            found.append(f"{name} grows: {then:.1f}, then {now:.1f}")
    return found


async def run(bench: Lab, options: argparse.Namespace) -> bool:
    """All of it; whether all was well."""
    env = {**PATIENT, **SMALL_GATEWAY, "HEADWATER_LEDGER__DIR": str(bench.folder / "ledger")}
    gateway = await asyncio.to_thread(lambda: bench.launch_gateway(redis=bench.redis.url, env=env))
    await recovers(gateway, len(bench.workers))
    await capacity(gateway.url, MEASURE_S / 4)
    per_s = SHARE * await capacity(gateway.url, MEASURE_S)
    print(f"{per_s:.1f} requests per second", flush=True)
    print("seconds", *NAMES, "requests", sep="\t")
    faults = Faults(bench, gateway, small_workers(options))
    load = Load(lambda: gateway.url, per_s, faults.excused, most=MOST)
    tasks = [asyncio.create_task(load.run()), asyncio.create_task(faults.run())]
    begun, samples, stray = time.monotonic(), list[Sample](), dict[str, None]()
    while time.monotonic() - begun < options.minutes * 60:
        await asyncio.sleep(options.every_s)
        held, found = await asyncio.to_thread(sample, bench, gateway)
        samples.append(held)
        stray.update(dict.fromkeys(found))
        shown = (f"{getattr(held, name):.1f}" for name in NAMES)
        at = f"{time.monotonic() - begun:.0f}"
        print(at, *shown, load.counts["requests"], sep="\t", flush=True)
    tasks[1].cancel()
    load.ends = True
    await tasks[0]
    found = growth(samples, faults.rounds) + list(stray)[:20] + load.lost[:20]
    for line in found:
        print(f"FAULT {line}")
    print(f"{faults.done} faults,", dict(load.counts))
    return not found


def small_workers(options: argparse.Namespace) -> dict[str, str]:
    """What the workers are started with."""
    return {"HEADWATER_CACHE__KV_BLOCKS": str(options.kv_blocks)}


def _without_sockets(folder: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


async def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--kv-blocks", type=int, default=KV_BLOCKS, help="of each worker")
    parser.add_argument("--keep", type=Path, help="a new folder for the ledger and all logs")
    options = parser.parse_args()
    async with lab(2, lambda server: server.url, small_workers(options)) as bench:
        well = await run(bench, options)
        if options.keep:
            shutil.copytree(bench.folder, options.keep, ignore=_without_sockets)
        return 0 if well else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
