"""Two real llama.cpp servers behind the gateway: learned routing beside taking turns.

    make test-llamacpp                  makes what it needs, runs, and fails if it is not better
    python -P bench/llamacpp.py --python PYTHON [--conversations 5 --turns 6] [--check]

Chats of several turns, two at a time, once under each policy with texts of their own. The servers
are processes (``bench/llamacpp_server.py``) with SmolLM2-135M on one thread each.
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
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.build import Gateway
from gateway.config import GatewayConfig
from shared.settings import load

WORKERS = 2
POLICIES = ("round_robin", "cost")
SERVER = Path(__file__).with_name("llamacpp_server.py")
WORDS = "river stone amber signal ladder orchard copper window meadow harbor lantern saddle".split()


class Server:
    """One server process."""

    def __init__(self, python: str) -> None:
        command = [python, "-P", str(SERVER), "4", "2048"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]

    def url(self) -> str:
        """Where it listens; waits for its weights. Raises if it ended instead."""
        for line in self.process.stdout:
            if line.startswith("ready "):
                return str(line.split()[1])
        raise SystemExit(f"the llama.cpp server ended with {self.process.wait()}")

    def stop(self) -> None:
        """End it."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def prose(rng: random.Random, words: int) -> str:
    """So many words."""
    return " ".join(rng.choices(WORDS, k=words))


async def turn(
    session: aiohttp.ClientSession, url: str, model: str, history: list[Any], policy: str
) -> tuple[str, int, int, float]:
    """One streamed answer: text, prompt and cached tokens, seconds to the first content."""
    body = {"model": model, "messages": history, "max_tokens": 8, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    clock = asyncio.get_running_loop().time
    begun, first, text, usage = clock(), 0.0, "", {}
    headers = {"x-headwater-policy": policy}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                first = first or (clock() if piece else 0.0)
                text += piece
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return text, usage["prompt_tokens"], cached, first - begun


async def play(
    url: str, model: str, policy: str, conversations: int, turns: int
) -> dict[str, float]:
    """All conversations under one policy."""
    texts, order = random.Random(policy), random.Random(7)
    histories = [
        [{"role": "system", "content": f"{policy} {n}: {prose(texts, 120)}"}]
        for n in range(conversations)
    ]
    waiting = [n for n in range(conversations) for _ in range(turns)]
    order.shuffle(waiting)
    busy: set[int] = set()
    answers: list[tuple[int, int, float]] = []

    async def take_turns(session: aiohttp.ClientSession) -> None:
        while waiting:
            which = next((n for n in waiting if n not in busy), None)
            if which is None:
                await asyncio.sleep(0.01)
                continue
            waiting.remove(which)
            busy.add(which)
            history = histories[which]
            history.append({"role": "user", "content": prose(texts, 12)})
            text, prompt, cached, ttft = await turn(session, url, model, history, policy)
            history.append({"role": "assistant", "content": text})
            answers.append((prompt, cached, ttft))
            busy.discard(which)

    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(take_turns(session) for _ in range(WORKERS)))
    return {
        "hit_rate": sum(c for _, c, _ in answers) / sum(p for p, _, _ in answers),
        "ttft_mean_s": statistics.mean(t for _, _, t in answers),
        "ttft_median_s": statistics.median(t for _, _, t in answers),
    }


async def measure(urls: list[str], conversations: int, turns: int) -> dict[str, Any]:
    """Both policies on the same servers."""
    flags = {
        "listen.port": 0,
        "listen.admin_port": 0,
        "log.level": "error",
        "workers.urls": ",".join(urls),
        "workers.health_timeout_s": 10.0,
        "routing.allow_policy_header": True,
    }
    gateway = Gateway(load(GatewayConfig, file=None, env={}, flags=flags))
    try:
        await gateway.start()
        await gateway.until_ready()
        while len(gateway.router.workers(0.0)) < WORKERS:  # noqa: ASYNC110 - can only be asked
            await asyncio.sleep(0.1)
        model = gateway.router.models()[0]
        rows: dict[str, Any] = {}
        for policy in POLICIES:
            rows[policy] = await play(gateway.url, model, policy, conversations, turns)
        workers = gateway.router.workers(asyncio.get_running_loop().time())
        rows["workers"] = [f"{w.engine}, {w.trust}: {w.trust_reason}" for w in workers]
        return rows
    finally:
        await gateway.close()


def main() -> None:
    """Start the servers, measure, print; with ``--check`` fail if learned routing is not better."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="a Python that has xllamacpp")
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    servers: list[Server] = []
    try:
        servers += [Server(asked.python) for _ in range(WORKERS)]
        urls = [server.url() for server in servers]
        rows = asyncio.run(measure(urls, asked.conversations, asked.turns))
    finally:
        for server in servers:
            server.stop()
    print(json.dumps(rows))
    print("| policy | delivered hit rate | mean TTFT | median TTFT |\n|---|---|---|---|")
    for policy in POLICIES:
        row = rows[policy]
        times = f"{row['ttft_mean_s']:.2f} s | {row['ttft_median_s']:.2f} s"
        print(f"| {policy} | {row['hit_rate']:.3f} | {times} |")
    robin, cost = rows["round_robin"], rows["cost"]
    better = cost["hit_rate"] > robin["hit_rate"] and cost["ttft_mean_s"] < robin["ttft_mean_s"]
    known = all(text.startswith("llamacpp, learned") for text in rows["workers"])
    if asked.check and not (better and known):
        sys.exit(f"learned routing is not better than taking turns: {rows}")


if __name__ == "__main__":
    main()
