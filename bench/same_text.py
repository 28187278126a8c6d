"""Are cached answers ever wrong? The same requests to a worker with a small pool and to one without
a prefix cache, eight at a time: every text must be the same.

    python -P bench/same_text.py [--model smollm2] [--requests 1000] [--kv-blocks 48]

Prompts share 20 beginnings of different lengths, so the small pool evicts and reuses all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import httpx  # noqa: E402
from lab import HEADWATER, free_ports, prose  # noqa: E402

WIDTH = 8


def requests(count: int, seed: int) -> list[dict[str, object]]:
    """Completions with shared beginnings; every third one is sampled with a seed of its own."""
    rng = random.Random(seed)
    families = [prose(rng, rng.randrange(5, 80)) for _ in range(20)]
    made = []
    for number in range(count):
        prompt = f"{rng.choice(families)} {prose(rng, rng.randrange(0, 20))}"
        body: dict[str, object] = {"prompt": prompt, "max_tokens": rng.randrange(1, 17)}
        body |= {"temperature": 0.7, "seed": number} if number % 3 == 0 else {"temperature": 0}
        made.append(body)
    return made


@contextlib.asynccontextmanager
async def worker(*flags: str) -> AsyncIterator[str]:
    """A worker of its own; yields its URL."""
    port = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(HEADWATER, "worker", "--port", str(port), "--threads", "1", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        while not (line := await process.stdout.readline()).startswith(b"ready "):
            if not line:
                raise RuntimeError("the worker ended before it was ready")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def answers(
    url: str, bodies: list[dict[str, object]], progress: str
) -> tuple[list[str], int]:
    """Texts in the order of ``bodies``, and how many prompt tokens came from the cache."""
    texts = [""] * len(bodies)
    cached = done = 0
    gate = asyncio.Semaphore(WIDTH)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def ask(number: int) -> None:
            nonlocal cached, done
            async with gate:
                answer = (await client.post("/v1/completions", json=bodies[number])).json()
            texts[number] = answer["choices"][0]["text"]
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            done += 1
            if done % 250 == 0:
                print(f"{progress}: {done}", file=sys.stderr, flush=True)

        await asyncio.gather(*map(ask, range(len(bodies))))
    return texts, cached


async def compare(model: str, count: int, kv_blocks: int, seed: int, dtype: str) -> int:
    """Both runs at the same time, one core each; exit code 1 if a text differs."""
    bodies = requests(count, seed)
    flags = ("--model", model, "--dtype", dtype)
    async with (
        worker(*flags, "--kv-blocks", str(kv_blocks)) as small,
        worker(*flags, "--no-prefix-cache", "--kv-blocks", "400") as plain,
    ):
        (texts, cached), (reference, uncached) = await asyncio.gather(
            answers(small, bodies, "small pool"), answers(plain, bodies, "no cache")
        )
        metrics = httpx.get(f"{small}/metrics").text.splitlines()
    different = [i for i in range(count) if texts[i] != reference[i]]
    preemptions = [
        line.split()[-1]
        for line in metrics
        if line.startswith("headwater_engine_preemptions_total")
    ]
    print(
        json.dumps(
            {
                "model": model,
                "dtype": dtype,
                "requests": count,
                "kv_blocks": kv_blocks,
                "cached_tokens": cached,
                "cached_tokens_without_cache": uncached,
                "preemptions": preemptions,
                "different": len(different),
            }
        )
    )
    for number in different[:5]:
        print(
            json.dumps(
                {"request": bodies[number], "cached": texts[number], "reference": reference[number]}
            )
        )
    return 1 if different or not cached or uncached else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kv-blocks", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    sys.exit(
        asyncio.run(compare(asked.model, asked.requests, asked.kv_blocks, asked.seed, asked.dtype))
    )
