"""Does a seeded request always say the same? Alone, repeated, beside seven others with and without
seeds, preempted on a pool that is too small, and on a second worker.

    python -P bench/seed.py [--model smollm2] [--seed 42]

Prints one line per situation; exit code 1 if a text differs or nothing was preempted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import httpx  # noqa: E402
from lab import prose  # noqa: E402
from same_text import worker  # noqa: E402

NEIGHBOURS = 7
NEW = 32
ROUNDS = 2
SMALL_POOL = 24
"""KV blocks: two or three of the eight fit."""
PREEMPTIONS = "headwater_engine_preemptions_total"


def request(seed: int | None) -> dict[str, Any]:
    """The request under test."""
    prompt = prose(random.Random(1), 40)
    body = {"prompt": prompt, "temperature": 0.8, "max_tokens": NEW, "ignore_eos": True}
    return body if seed is None else {**body, "seed": seed}


def others(rng: random.Random, seeded: bool) -> list[dict[str, Any]]:
    """Its neighbours, each with a prompt of its own."""
    made = []
    for number in range(NEIGHBOURS):
        body = {**request(number if seeded else None), "prompt": prose(rng, rng.randrange(20, 60))}
        made.append(body)
    return made


async def say(client: httpx.AsyncClient, body: dict[str, Any], after_s: float = 0.0) -> str:
    """The text of one answer."""
    await asyncio.sleep(after_s)
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def crowded(client: httpx.AsyncClient, seed: int, *, seeded: bool) -> str:
    """The text when seven others run: it comes last, so it is the first to be preempted."""
    rng = random.Random(seed)
    neighbours = [say(client, body) for body in others(rng, seeded)]
    *_, text = await asyncio.gather(*neighbours, say(client, request(seed), after_s=0.2))
    return text


async def preemptions(client: httpx.AsyncClient) -> float:
    """So far."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(PREEMPTIONS))


async def compare(model: str, seed: int) -> int:
    """All situations; exit code."""
    flags = ("--model", model)
    texts: dict[str, list[str]] = {}
    async with (
        worker(*flags, "--kv-blocks", "400") as one,
        worker(*flags, "--kv-blocks", str(SMALL_POOL), "--max-batch-tokens", "64") as small,
        httpx.AsyncClient(base_url=one, timeout=600) as first,
        httpx.AsyncClient(base_url=small, timeout=600) as second,
    ):
        texts["alone"] = [await say(first, request(seed))]
        texts["warm"] = [await say(first, request(seed)) for _ in range(ROUNDS)]
        for seeded in (False, True):
            name = f"beside {NEIGHBOURS} {'seeded' if seeded else 'unseeded'}"
            texts[name] = [await crowded(first, seed, seeded=seeded) for _ in range(ROUNDS)]
        texts["second worker"] = [await say(second, request(seed))]
        texts["small pool"] = [
            await crowded(second, seed, seeded=bool(turn % 2)) for turn in range(ROUNDS)
        ]
        preempted = await preemptions(second)
        unseeded = {await say(first, request(None)) for _ in range(5)}
    right = texts["alone"][0]
    print(f"{'situation':<22}answers  equal to the first one")
    for name, said in texts.items():
        print(f"{name:<22}{len(said):>7}  {sum(text == right for text in said)}")
    print(f"preemptions {preempted:.0f}, different answers of five without a seed {len(unseeded)}")
    same = all(text == right for said in texts.values() for text in said)
    return 0 if same and preempted > 0 and len(unseeded) > 1 else 1


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    return asyncio.run(compare(options.model, options.seed))


if __name__ == "__main__":
    raise SystemExit(main())
