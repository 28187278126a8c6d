"""One gateway process and several on one port, the same conversations: CPU, and hit rate.

    python -P bench/processes.py [--workers 4] [--conversations 48] [--turns 6] [--rounds 1]

Conversations of about 1,500 to 6,000 characters grow by a turn at a time; each request comes on a
connection of its own, so that the turns of one meet different processes. Prints for 1, 2 and 4
processes: CPU milliseconds a request of the gateway's whole process tree while it serves, less what
the same tree takes in as much time without requests (health, load, feeds: so much a second, however
many requests there are), which is shown as a share of a core; and the hit rate that the workers
report. The lengths of the conversations are the same for each number of processes, their texts are
not.

The numbers take turns in each round. Exit code 1 if two processes take more than 1.2 times the CPU
of one, or the hit rate with four is more than 0.01 below that with one: medians of the rounds' own
ratios and differences.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import aiohttp  # noqa: E402
import psutil  # noqa: E402
from livelab import Lab, lab  # noqa: E402

COUNTS = (1, 2, 4)
AT_ONCE = 8
"""Conversations under way."""
WARM = 180
"""Conversations of one turn before that, so that what each process does once is done: tokenizers
and templates are read at the first request, arrays are loaded when the index has grown."""
IDLE_S = 5.0
"""How long the tree is watched without requests."""


def cpu_s(pid: int) -> float:
    """Of a process and all below it, so far."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(each.cpu_times().user + each.cpu_times().system for each in tree)


async def converse(url: str, number: int, turns: int, seed: int) -> list[tuple[int, int]]:
    """One conversation; (prompt tokens, those from the cache) of each turn."""
    lengths, rng = random.Random(number), random.Random(f"{seed} {number}")
    messages: list[dict[str, str]] = []
    counted = []
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        for turn in range(turns):
            length = lengths.randrange(1500, 6000) if turn == 0 else 300
            text = "".join(rng.choices("abcdefghijklmnop qrstuvwxyz", k=length))
            messages.append({"role": "user", "content": text})
            body: dict[str, Any] = {"model": "fake", "messages": messages, "max_tokens": 8}
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                value = await reply.json()
                if reply.status != 200:
                    raise SystemExit(f"{reply.status}: {value}")
            usage = value["usage"]
            counted.append(
                (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
            )
            messages.append(
                {"role": "assistant", "content": value["choices"][0]["message"]["content"]}
            )
    return counted


async def measure(bench: Lab, processes: int, options: argparse.Namespace, seed: int) -> Any:
    """(CPU seconds a request beyond idling, share of a core when idle, hit rate)."""
    gateway = await asyncio.to_thread(
        lambda: bench.launch_gateway(
            *(worker.url for worker in bench.workers), flags=("--processes", str(processes))
        )
    )
    await asyncio.to_thread(gateway.await_exact, len(bench.workers), 60)
    while processes > 1 and gateway.get("/health")["processes"] < processes:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, turns: int) -> list[tuple[int, int]]:
        async with gate:
            return await converse(gateway.url, number, turns, seed)

    await asyncio.gather(*(one(-1 - n, 1) for n in range(WARM)))
    idle = cpu_s(gateway.process.pid)
    await asyncio.sleep(IDLE_S)
    idle = (cpu_s(gateway.process.pid) - idle) / IDLE_S
    begun, since = cpu_s(gateway.process.pid), time.monotonic()
    told = await asyncio.gather(*(one(n, options.turns) for n in range(options.conversations)))
    spent = cpu_s(gateway.process.pid) - begun - idle * (time.monotonic() - since)
    await asyncio.to_thread(gateway.stop)
    turns = [turn for each in told for turn in each]
    hit = sum(cached for _, cached in turns) / sum(prompt for prompt, _ in turns)
    return spent / len(turns), idle, hit


async def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print("processes", "cpu_ms", "idle", "hit_rate", sep="\t")
    found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in COUNTS}
    async with lab(options.workers, lambda server: server.url) as bench:
        for n in range(options.rounds):
            # In turns: the machine is not as fast, or as busy, all the time.
            for processes, rounds in found.items():
                rounds.append(await measure(bench, processes, options, seed=100 * n + processes))
    for processes, rounds in found.items():
        cpu, idle, hit = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(processes, f"{cpu * 1e3:.2f}", f"{idle:.1%}", f"{hit:.4f}", sep="\t")
    pairs = zip(found[1], found[2], found[4], strict=True)
    ratios = [(two[0] / one[0], one[2] - four[2]) for one, two, four in pairs]
    dearer, lost = (statistics.median(column) for column in zip(*ratios, strict=True))
    print("of each round:", *(f"{ratio:.2f}x {-less:+.4f}" for ratio, less in ratios), sep="\t")
    print(f"CPU with two processes {dearer:.2f}x, hit rate with four {-lost:+.4f}")
    return 0 if dearer <= 1.2 and lost <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
