"""The index: microseconds of a look-up, bytes a block, events a second, bytes in Redis.

    python -P bench/index.py [--blocks 1000000,10000000] [--rounds 5] [--no-redis]

Both storages are measured in one run: a dict, and arrays (numpy). Blocks are held by one worker and
by four (``holders``); memory is what the process grew by. Redis: a real server, checkpoints as a
worker writes them, ``used_memory`` before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gateway.index.backends import use_arrays  # noqa: E402
from gateway.index.table import PrefixTable  # noqa: E402
from shared.blocks import pack_keys  # noqa: E402
from shared.events import BlocksStored, EventBatch, Snapshot  # noqa: E402
from shared.types import BlockKey, Epoch, WorkerId  # noqa: E402

STORAGES = ("dict", "arrays")
PIECE = 1024


def table_of(storage: str) -> PrefixTable:
    """An empty one."""
    table = PrefixTable(10**9, random.Random(1))
    if storage == "arrays":
        use_arrays(table)
        table.compact_from = 1
    return table


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def feed(table: PrefixTable, worker: str, seq: int, keys: bytes) -> None:
    """One batch of stored blocks."""
    table.apply(
        EventBatch(WorkerId(worker), Epoch(1), "worker", seq, 0.0, 1, (BlocksStored(keys, None),))
    )


def median_us(body: Callable[[], object], rounds: int, n: int) -> float:
    """Median over rounds of the mean of ``n`` calls."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(n):
            body()
        times.append((time.perf_counter() - begun) / n * 1e6)
    return statistics.median(times)


def look_ups(storage: str, rounds: int) -> dict[str, float]:
    """Prompts of several lengths among 64 workers, in a table of about half a million keys."""
    rng = random.Random(2)
    table = table_of(storage)
    prompts = [[BlockKey(rng.getrandbits(64)) for _ in range(2000)] for _ in range(200)]
    workers = [f"w{n}" for n in range(64)]
    seqs = dict.fromkeys(workers, 0)
    for worker in workers:
        table.join(WorkerId(worker), Epoch(1), 1)
    for prompt in prompts:
        for worker in rng.sample(workers, 8):
            seqs[worker] += 1
            feed(table, worker, seqs[worker], pack_keys(prompt[: rng.randrange(200, 2001)]))
    while table.tidy(100_000):
        pass
    found = {}
    for n in (16, 128, 512, 2000):
        turns = iter(range(10**9))
        found[f"{n} keys"] = median_us(
            lambda n=n, turns=turns: table.match(prompts[next(turns) % 200][:n]), rounds, 100
        )
    miss = [BlockKey(rng.getrandbits(64)) for _ in range(2000)]
    found["miss"] = median_us(lambda: table.match(miss), rounds, 100)
    return found


def events(storage: str, rounds: int) -> dict[str, float]:
    """Blocks a second, applied in batches of a few (decodes) and of many (prefills, contents)."""
    found = {}
    for size in (1, 32, 512):
        rates = []
        for turn in range(rounds):
            rng = random.Random(turn)
            table = table_of(storage)
            table.join(WorkerId("w"), Epoch(1), 1)
            n = max(60, 40_000 // size)
            batches = [pack_keys([rng.getrandbits(64) for _ in range(size)]) for _ in range(n)]
            begun = time.perf_counter()
            for seq, keys in enumerate(batches, 1):
                feed(table, "w", seq, keys)
            rates.append(n * size / (time.perf_counter() - begun))
        found[f"{size} a batch"] = statistics.median(rates)
    return found


def memory(storage: str, blocks: int, holders: int) -> dict[str, float]:
    """In a process of its own: bytes a block, seconds to fill, longest single step."""
    code = f"import bench.index as b; b.memory_here({storage!r}, {blocks}, {holders})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def memory_here(storage: str, blocks: int, holders: int) -> None:
    """Body of :func:`memory`: contents come in pieces, as gateways take them in."""
    rng = random.Random(3)
    table = table_of(storage)
    names = [f"w{n}" for n in range(holders)]
    for name in names:
        table.join(WorkerId(name), Epoch(1), 1)
        table.apply(
            EventBatch(WorkerId(name), Epoch(1), "worker", 1, 0.0, 1, (Snapshot(pack_keys([1])),))
        )
    before, longest, begun = rss(), 0.0, time.perf_counter()
    for seq in range(2, blocks // PIECE + 2):
        keys = rng.randbytes(8 * PIECE)
        for name in names:
            at = time.thread_time()
            feed(table, name, seq, keys)
            longest = max(longest, time.thread_time() - at)
    seconds = time.perf_counter() - begun
    while table.tidy(10_000):
        pass
    n = blocks // PIECE * PIECE
    print(
        json.dumps({"bytes": (rss() - before) / n, "fill_s": seconds, "longest_ms": longest * 1e3})
    )


async def redis_bytes(blocks: int) -> float:
    """Bytes a block and holder in a real server: checkpoints of 100,000 blocks each."""
    from gateway.cluster.redisserver import server_spec
    from shared.rediskeys import CHUNKS, RedisKeys
    from shared.redislink import RedisLink

    with tempfile.TemporaryDirectory() as folder:
        spec, url = server_spec(Path(folder), Path(folder) / "log")
        with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
            spec.argv, stdout=subprocess.DEVNULL
        ) as server:
            try:
                assert spec.ready is not None
                await asyncio.wait_for(spec.ready(), 20)
                link, names, rng = RedisLink(url, 5.0), RedisKeys("bench"), random.Random(4)

                async def used() -> int:
                    [info] = await link.call([("INFO", "memory")])
                    return int(info.split(b"used_memory:")[1].split(b"\r")[0])

                before = await used()
                each = min(blocks, 100_000)
                for n in range(blocks // each):
                    worker = WorkerId(f"w{n}")
                    chunk = [rng.randbytes(each // CHUNKS * 8) for _ in range(CHUNKS)]
                    await link.transact(
                        [
                            ("SET", names.chunk(worker, Epoch(1), i), data, "PX", 60_000)
                            for i, data in enumerate(chunk)
                        ]
                    )
                after = await used()
                await link.drop()
                return (after - before) / (blocks // each * each)
            finally:
                server.terminate()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default="1000000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-redis", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.blocks.split(",")]
    print("look-up, us (64 workers, 8 holders a prompt)", *STORAGES, sep="\t")
    rows = {storage: look_ups(storage, options.rounds) for storage in STORAGES}
    for name in rows["dict"]:
        print(name, *(f"{rows[storage][name]:.0f}" for storage in STORAGES), sep="\t")
    print("events, thousand blocks a second", *STORAGES, sep="\t")
    rows = {storage: events(storage, options.rounds) for storage in STORAGES}
    for name in rows["dict"]:
        print(name, *(f"{rows[storage][name] / 1e3:.0f}" for storage in STORAGES), sep="\t")
    print(
        "memory: blocks",
        "holders",
        "storage",
        "bytes/block",
        "fill s",
        "longest step, CPU ms",
        sep="\t",
    )
    for blocks in sizes:
        for holders in (1, 4):
            for storage in STORAGES:
                if storage == "dict" and blocks * holders > 4_000_000:
                    continue
                m = memory(storage, blocks, holders)
                cells = f"{m['bytes']:.1f}", f"{m['fill_s']:.1f}", f"{m['longest_ms']:.1f}"
                print(blocks, holders, storage, *cells, sep="\t")
    if not options.no_redis:
        print(f"in Redis, bytes a block and holder\t{asyncio.run(redis_bytes(1_000_000)):.2f}")


if __name__ == "__main__":
    main()
