"""Conversations of several turns over a few workers: cost against round robin, same arrivals.

    python -P bench/conversations.py --conversations 7,8 --workers 2 --seeds 1,2,3
    python -P bench/conversations.py --conversations 20 --workers 4 --fake --seeds 1,2,3

Arrivals are shuffled by the seed: at each moment a random conversation whose last answer is there
takes its next turn, with at most one running request per worker. Texts differ per cell, so no cell
finds anything in the cache that another one left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import httpx  # noqa: E402
from lab import HEADWATER, Answer, Cluster, ask, cluster, prose  # noqa: E402

POLICIES = ("cost", "round_robin")


async def play(
    up: Cluster, count: int, turns: int, policy: str, seed: int, width: int
) -> list[Answer]:
    """One cell; returns every answer."""
    rng = random.Random(f"{seed}")  # the same draws of who comes next for every policy
    text = random.Random(f"{seed}-{policy}-{count}")  # but texts of its own
    system = prose(text, 60)
    histories = [
        [{"role": "system", "content": f"{system} {prose(text, 120)}"}] for _ in range(count)
    ]
    remaining = [turns] * count
    idle = set(range(count))
    answers: list[Answer] = []

    async def take_turns(client: httpx.AsyncClient) -> None:
        while any(remaining):
            ready = [i for i in sorted(idle) if remaining[i]]
            if not ready:
                await asyncio.sleep(0.002)
                continue
            which = rng.choice(ready)
            idle.discard(which)
            remaining[which] -= 1
            history = histories[which]
            history.append({"role": "user", "content": prose(text, 20)})
            answer = await ask(client, up.url, up.model, history, max_tokens=16, policy=policy)
            history.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
            idle.add(which)

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=100)) as client:
        await asyncio.gather(*(take_turns(client) for _ in range(width)))
    return answers


async def run(counts: list[int], turns: int, seeds: list[int], workers: int, fake: bool) -> None:
    """All cells on one cluster; prints one JSON line per cell and the ledger's own report."""
    flags = ["--fake"] if fake else []
    env = {"HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "300"} if fake else {}
    wins = []
    async with cluster(*flags, workers=workers, env=env) as up:
        for count in counts:
            for seed in seeds:
                row: dict[str, dict[str, float]] = {}
                for policy in POLICIES:
                    answers = await play(up, count, turns, policy, seed, workers)
                    prompt = sum(a.prompt_tokens for a in answers)
                    row[policy] = {
                        "hit_rate": round(sum(a.cached_tokens for a in answers) / prompt, 4),
                        "mean_ttft_s": round(statistics.mean(a.ttft_s for a in answers), 4),
                    }
                cost, robin = row["cost"], row["round_robin"]
                wins.append(
                    cost["hit_rate"] > robin["hit_rate"]
                    and cost["mean_ttft_s"] < robin["mean_ttft_s"]
                )
                print(
                    json.dumps({"conversations": count, "workers": workers, "seed": seed, **row}),
                    flush=True,
                )
        await asyncio.sleep(1.0)
        report = subprocess.run(
            [HEADWATER, "report", str(up.ledger), "--by", "policy"],
            capture_output=True,
            text=True,
            check=False,
        )
        print(report.stdout or report.stderr)
    print(json.dumps({"cells": len(wins), "cost_wins_both": sum(wins)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", default="7,8")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fake", action="store_true")
    asked = parser.parse_args()
    asyncio.run(
        run(
            [int(c) for c in asked.conversations.split(",")],
            asked.turns,
            [int(s) for s in asked.seeds.split(",")],
            asked.workers,
            asked.fake,
        )
    )
