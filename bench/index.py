"""The index: CPU time of a look-up, bytes a block, events a second; and the same in Redis.

    python -P bench/index.py [--blocks 1000000,10000000] [--rounds 5] [--no-redis]

Both storages are measured in one run: a dict, and arrays (numpy). ``walked``: workers of any make.
``closed``: workers that evict leaves first, as our own do. Blocks are held by one worker and by
four (``holders``); memory is what the process grew by. Redis: each real server that is installed;
bytes are ``used_memory`` after and before checkpoints are written (``bench/index_redis.py``).
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
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import index_redis  # noqa: E402
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
    """Median over rounds of the mean of ``n`` calls, in microseconds of CPU."""
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(n):
            body()
        times.append((time.process_time() - begun) / n * 1e6)
    return statistics.median(times)


def contents() -> tuple[list[list[BlockKey]], list[tuple[str, int, int]]]:
    """Prompts of 2,000 keys, and (worker, prompt, keys of it that it holds): 64 workers, eight of
    which hold a beginning of each prompt; 359,000 keys in all."""
    rng = random.Random(2)
    prompts = [[BlockKey(rng.getrandbits(64)) for _ in range(2000)] for _ in range(200)]
    held = [
        (f"w{worker}", number, rng.randrange(200, 2001))
        for number in range(len(prompts))
        for worker in rng.sample(range(64), 8)
    ]
    return prompts, held


def look_ups(storage: str, rounds: int, *, closed: bool) -> dict[str, float]:
    """Prompts of several lengths, at the workers of :func:`contents`."""
    table, (prompts, held) = table_of(storage), contents()
    seqs = dict.fromkeys((f"w{n}" for n in range(64)), 0)
    for worker in seqs:
        table.join(WorkerId(worker), Epoch(1), 1, closed=closed)
    for worker, number, depth in held:
        seqs[worker] += 1
        feed(table, worker, seqs[worker], pack_keys(prompts[number][:depth]))
    while table.tidy(100_000):
        pass
    found = {}
    for n in (16, 128, 512, 2000):
        turns = iter(range(10**9))
        found[f"{n} keys"] = median_us(
            lambda n=n, turns=turns: table.match(prompts[next(turns) % 200][:n]), rounds, 100
        )
    miss = [BlockKey(key) for key in range(2000)]
    found["miss"] = median_us(lambda: table.match(miss), rounds, 100)
    return found


def events(storage: str, rounds: int, *, closed: bool) -> dict[str, float]:
    """Blocks a second, applied in batches of a few (decodes) and of many (prefills, contents)."""
    found = {}
    for size in (1, 32, 512):
        rates = []
        for turn in range(rounds):
            rng = random.Random(turn)
            table = table_of(storage)
            table.join(WorkerId("w"), Epoch(1), 1, closed=closed)
            n = max(60, 40_000 // size)
            batches = [pack_keys([rng.getrandbits(64) for _ in range(size)]) for _ in range(n)]
            begun = time.process_time()
            for seq, keys in enumerate(batches, 1):
                feed(table, "w", seq, keys)
            rates.append(n * size / (time.process_time() - begun))
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
    before, longest, begun = rss(), 0.0, time.process_time()
    for seq in range(2, blocks // PIECE + 2):
        keys = rng.randbytes(8 * PIECE)
        for name in names:
            at = time.thread_time()
            feed(table, name, seq, keys)
            longest = max(longest, time.thread_time() - at)
    seconds = time.process_time() - begun
    while table.tidy(10_000):
        pass
    n = blocks // PIECE * PIECE
    print(
        json.dumps({"bytes": (rss() - before) / n, "fill_s": seconds, "longest_ms": longest * 1e3})
    )


def table_by_storage(title: str, measure: Callable[..., dict[str, float]], rounds: int) -> None:
    """One line a case, one column for each storage and kind of worker."""
    kinds = [(storage, closed) for storage in STORAGES for closed in (False, True)]
    print(title, *(f"{s}, {'closed' if c else 'walked'}" for s, c in kinds), sep="\t")
    found = [measure(storage, rounds, closed=closed) for storage, closed in kinds]
    for name in found[0]:
        print(name, *(f"{column[name]:.0f}" for column in found), sep="\t")


async def in_redis(sizes: list[int], rounds: int) -> None:
    """Of each server: bytes a block and holder, and a look-up of 2,000 keys at 64 workers, in us of
    this process's CPU + the server's."""
    prompts, beginnings = contents()
    table, held = PrefixTable(10**9, random.Random(1)), {f"w{n}": set[int]() for n in range(64)}
    for worker, number, depth in beginnings:
        held[worker].update(prompts[number][:depth])
    for worker, keys in held.items():
        table.join(WorkerId(worker), Epoch(1), 1)
        feed(table, worker, 1, pack_keys(keys))
    for program in index_redis.servers():
        async with index_redis.running(program) as (name, link):
            for blocks in sizes:
                figure = await index_redis.bytes_per_block(link, blocks)
                print(f"{name}: bytes a block and holder, {blocks} blocks\t{figure:.2f}")
            found = await index_redis.look_ups(link, prompts, held, table, rounds)
            for what, (own, server) in found.items():
                print(f"{name}: look-up of 2000 keys: {what}\t{own:.0f} + {server:.0f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default="1000000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-redis", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.blocks.split(",")]
    table_by_storage("look-up, us (64 workers)", look_ups, options.rounds)
    table_by_storage("events, blocks a second", events, options.rounds)
    print(
        "memory: blocks",
        "holders",
        "storage",
        "bytes/block",
        "fill, CPU s",
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
        asyncio.run(in_redis(sizes, options.rounds))


if __name__ == "__main__":
    main()
