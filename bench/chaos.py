"""Everything that can break around a gateway breaks, under load: nothing may be lost or leak.

    python -P bench/chaos.py [--minutes 3] [--per-s 8] [--seed 1] [--only kill,freeze]

Three workers without a model and one that lies, a gateway and Redis as processes, about half of
the requests streamed. Faults come one after the other, each of them at least once however long
that takes. Prints for each fault the requests meanwhile, those that were told an error that the
fault made unavoidable, those lost, and the seconds after its end until all workers are ready and
Redis is used. Exit code 1 if a request was lost, a fault was not recovered from, or anything
leaked: attempts in flight, sockets, memory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

from chaosfaults import FAULTS, Chaos, good  # noqa: E402
from chaoslab import PATIENT, SILENCE, Load, read, recovers  # noqa: E402
from livelab import Lab, lab  # noqa: E402
from rig import Stub  # noqa: E402

GROWN_MIB = 40.0
GROWN_FDS = 12


async def one(at: Chaos, load: Load, name: str) -> bool:
    """Run a fault under load and print its row; whether nothing was lost and all came back."""
    before = load.counts.copy()
    at.liar.seen.clear()
    at.now, at.until = name, float("inf")
    await FAULTS[name](at)
    took = await recovers(at.gateway, len(at.bench.workers) + 1)
    await asyncio.sleep(2.0)
    at.until = time.monotonic()
    gone = load.counts - before
    asked, at.liar.seen = len(at.liar.seen), []
    row = (gone["requests"], gone["told"], gone["lost"], asked, f"{took:.1f}")
    print(f"{name:14}", *row, sep="\t", flush=True)
    for line in load.lost[before["lost"] :][:3]:
        print("   ", line)
    return not gone["lost"] and took < 45


async def leaks(at: Chaos, base: tuple[float, int]) -> list[str]:
    """What has not gone 40 s after the load."""
    found: list[str] = []
    for _ in range(40):
        await asyncio.sleep(1.0)
        now = await asyncio.to_thread(read, at.gateway)
        found = []
        if now.inflight:
            found.append(f"{now.inflight:.0f} attempts are in flight")
        if now.fds > base[1] + GROWN_FDS:
            found.append(f"{now.fds} file descriptors, {base[1]} before")
        if now.rss_mib > base[0] + GROWN_MIB:
            found.append(f"{now.rss_mib:.0f} MiB, {base[0]:.0f} before")
        if not found:
            break
    print(f"memory {base[0]:.0f} -> {now.rss_mib:.0f} MiB, descriptors {base[1]} -> {now.fds}, "
          f"in flight {now.inflight:.0f}")  # fmt: skip
    return found


async def leave(at: Chaos) -> bool:
    """SIGTERM while streams run: each of them ends whole, and the gateway with code 0."""
    streams = [await at.ask(1500) for _ in range(10)]
    for reader, _ in streams:
        await reader.readuntil(b"\r\n\r\n")
    at.gateway.process.terminate()
    texts = await asyncio.gather(*(_rest(reader) for reader, _ in streams))
    code = await asyncio.to_thread(at.gateway.process.wait, 60)
    whole = sum(b"[DONE]" in text for text in texts)
    print(f"SIGTERM: {whole} of {len(streams)} streams whole, exit code {code}")
    at.hang_up()
    return whole == len(streams) and code == 0


async def _rest(reader: asyncio.StreamReader) -> bytes:
    got = b""
    while piece := await reader.read(4096):
        got += piece
        if got.endswith(b"0\r\n\r\n"):
            break
    return got


async def run(bench: Lab, options: argparse.Namespace) -> bool:
    """All of it; whether all was well."""
    liar = await Stub.start(("fake",))
    liar.respond = good
    env = {**PATIENT, **SILENCE, "HEADWATER_ROUTING__POLICY": options.policy}
    env |= {"HEADWATER_LEDGER__DIR": str(bench.folder / "ledger")}
    gateway = await asyncio.to_thread(
        lambda: bench.launch_gateway(liar.url, redis=bench.redis.url, env=env)
    )
    at = Chaos(bench, gateway, liar, random.Random(options.seed))
    load = Load(lambda: gateway.url, options.per_s, at.excused)
    await recovers(gateway, len(bench.workers) + 1)
    loading = asyncio.create_task(load.run())
    await asyncio.sleep(5.0)
    first = await asyncio.to_thread(read, gateway)
    names = options.only.split(",") if options.only else list(FAULTS)
    print(
        "fault         ",
        "requests",
        "told",
        "lost",
        "liar_asked",
        "recovery_s",
        sep="\t",
        flush=True,
    )
    ends = time.monotonic() + options.minutes * 60
    well = [await one(at, load, name) for name in names]
    while time.monotonic() < ends:
        well.append(await one(at, load, at.rng.choice(names)))
    load.ends = True
    await loading
    leaked = await leaks(at, (first.rss_mib, first.fds))
    for line in leaked:
        print(f"FAULT {line}")
    print(f"{len(well)} faults, {at.made_up} requests of bad clients,", dict(load.counts))
    left = await leave(at)
    await liar.stop()
    return all(well) and not leaked and not load.counts["lost"] and left


async def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--per-s", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="round_robin", help="so that all workers are asked")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    async with lab(3, lambda server: server.url) as bench:
        return 0 if await run(bench, options) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
