"""Time to first token with a shared prefix of about 2,000 tokens: cold against warm, side by side.

    python -P bench/ttft.py [--rounds 5]

The FLOP ideal is what the arithmetic alone would give: 2 x parameters per new token plus attention
of each new token over all before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import httpx  # noqa: E402
from lab import ask, cluster, prose  # noqa: E402

# SmolLM2-135M: parameters without the embedding, hidden size, layers
PARAMETERS, HIDDEN, LAYERS = 106.2e6, 576, 30


def flops(total: int, cached: int) -> float:
    """Prefill work of ``total - cached`` new tokens after ``cached`` ones."""
    new = total - cached
    attended = (total * total - cached * cached) / 2
    return 2 * PARAMETERS * new + 4 * attended * HIDDEN * LAYERS


async def measure(rounds: int) -> dict[str, object]:
    """Each round: a prefix nobody has seen, then the same prefix with another question."""
    cold, warm, ideal, workers = [], [], [], []
    async with cluster(workers=2) as up, httpx.AsyncClient(timeout=120) as client:
        await ask(client, up.url, up.model, [{"role": "user", "content": "hi"}], max_tokens=2)
        for number in range(rounds):
            system = {"role": "system", "content": prose(random.Random(number), 2000)}
            turns = [
                [
                    system,
                    {"role": "user", "content": f"Question {i}: {prose(random.Random(i), 18)}"},
                ]
                for i in range(2)
            ]
            first = await ask(client, up.url, up.model, turns[0], max_tokens=4)
            second = await ask(client, up.url, up.model, turns[1], max_tokens=4)
            cold.append(first)
            warm.append(second)
            ideal.append(
                flops(first.prompt_tokens, first.cached_tokens)
                / flops(second.prompt_tokens, second.cached_tokens)
            )
            workers.append(first.worker == second.worker)
    cold_s = statistics.median(a.ttft_s for a in cold)
    warm_s = statistics.median(a.ttft_s for a in warm)
    ratio, best = cold_s / warm_s, statistics.median(ideal)
    return {
        "rounds": rounds,
        "prompt_tokens": cold[0].prompt_tokens,
        "cached_tokens": [a.cached_tokens for a in warm],
        "predicted_tokens": [a.predicted_tokens for a in warm],
        "same_worker": all(workers),
        "ttft_cold_s": round(cold_s, 3),
        "ttft_warm_s": round(warm_s, 3),
        "reduction_percent": round(100 * (1 - warm_s / cold_s), 1),
        "ratio": round(ratio, 1),
        "flop_ideal_ratio": round(best, 1),
        "share_of_ideal_percent": round(100 * ratio / best, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    print(json.dumps(asyncio.run(measure(parser.parse_args().rounds))))
