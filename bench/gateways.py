"""One, two and four gateways on one Redis, the same traffic; then one of two is killed.

    python -P bench/gateways.py [--workers 4] [--per-s 12] [--seconds 12] [--rounds 1]

Every conversation is asked once, one after the other, in turn by the gateways; then the measured
traffic begins. Prints for each number of gateways: hit rate, the busiest worker's share of all
prompt tokens that had to be computed and of all requests (1.00 = an equal share), and median and
95th percentile of the times to answer. Then: seconds from ``kill -9`` of a gateway with work under
way until the other counts that work no longer.

Exit code 1 if the hit rate is more than a point below that of one gateway, the busiest worker has
more than 1.1 times the requests that it has with one, or a dead gateway's work is counted for more
than 2 s (and a second, until the workers have said so, too).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from livelab import Answer, Traffic, errors, hit_rate, lab  # noqa: E402

VANISH_S = 3.0


def busiest(answers: list[Answer], n_workers: int, *, tokens: bool) -> float:
    """Largest share of a worker, 1.0 if all are equal."""
    load: Counter[str] = Counter()
    for a in answers:
        load[a.worker] += a.prompt - a.cached if tokens else 1
    return max(load.values()) * n_workers / sum(load.values())


async def measure(n: int, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """A fresh cluster with ``n`` gateways."""
    async with lab(options.workers, lambda server: server.url) as bench:
        gateways = [await asyncio.to_thread(bench.gateway) for _ in range(n)]
        urls = [gateway.url for gateway in gateways]
        traffic = Traffic(urls, options.per_s, conversations=24, seed=seed)
        await traffic.warm()
        await traffic.run(options.seconds)
        answers = traffic.answers
        failed = errors(answers)
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
        times = sorted(a.seconds for a in answers)
        return {
            "hit": hit_rate(answers),
            "tokens": busiest(answers, options.workers, tokens=True),
            "requests": busiest(answers, options.workers, tokens=False),
            "p50_ms": statistics.median(times) * 1e3,
            "p95_ms": times[int(0.95 * len(times))] * 1e3,
        }


async def killed(options: argparse.Namespace) -> float:
    """Seconds until a dead gateway's work is counted no more."""
    async with lab(2, lambda server: server.url) as bench:
        one, two = [await asyncio.to_thread(bench.gateway) for _ in range(2)]
        doomed = Traffic([one.url], 10.0, conversations=400, seed=9)
        doomed.body = long_body  # type: ignore[method-assign, assignment]
        load = asyncio.create_task(doomed.run(1.5))
        await asyncio.sleep(1.5)
        waits = await asyncio.to_thread(waiting, two)
        if max(waits) < 0.5:
            raise SystemExit(f"the other gateway does not see the work: {waits}")
        one.process.kill()
        begun = time.monotonic()
        while max(await asyncio.to_thread(waiting, two)) > 0.1:
            await asyncio.sleep(0.05)
            if time.monotonic() - begun > 30:
                break
        took = time.monotonic() - begun
        await load
        return took


def long_body(number: int, rng: Any) -> dict[str, Any]:
    """A prompt of 30,000 tokens that nobody holds: over half a second of prefill."""
    text = f"{rng.getrandbits(64)} " * 1500
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 4}


def waiting(gateway: Any) -> list[float]:
    """Expected wait on each worker in seconds, as a gateway explains it."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    answer = gateway.http.post(f"{gateway.admin}/admin/explain", json=body).json()
    return [float(w["parts"].get("wait", 0.0)) for w in answer["workers"]]


async def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--per-s", type=float, default=12.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--gateways", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print(
        "gateways", "hit_rate", "busiest_tokens", "busiest_requests", "p50_ms", "p95_ms", sep="\t"
    )
    rows = {}
    numbers = [int(n) for n in options.gateways.split(",")]
    for n in numbers:
        rounds = [await measure(n, options, seed) for seed in range(options.rounds)]
        rows[n] = row = {k: statistics.median(r[k] for r in rounds) for k in rounds[0]}
        shown = (f"{row[k]:.3f}" for k in ("hit", "tokens", "requests"))
        print(n, *shown, f"{row['p50_ms']:.0f}", f"{row['p95_ms']:.0f}", sep="\t", flush=True)
    vanished = await killed(options)
    print(f"work of a killed gateway counted for {vanished:.1f} s")
    first, *others = numbers
    worst_hit = min(rows[n]["hit"] for n in others or numbers) - rows[first]["hit"]
    worst_share = max(rows[n]["requests"] for n in others or numbers) / rows[first]["requests"]
    print(f"hit rate against one gateway {worst_hit:+.3f}, busiest worker {worst_share:.2f}x")
    return 0 if worst_hit >= -0.01 and worst_share <= 1.1 and vanished <= VANISH_S else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
