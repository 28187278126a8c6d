"""Engines of other makes behind the gateway: what is delivered, predicted and believed.

    python -P bench/engines.py                       all engines, with and without their events
    python -P bench/engines.py --only vllm --turns 10 --conversations 24

A fleet of emulated engines (``gateway.emulators``: real block pools and slots, modelled delays,
the engines' own wire formats) behind a gateway in this process. Chats of several turns, each with
its own system prompt and the full history, as many at a time as there are engines. Printed per
fleet:

    delivered   cached_tokens that the engines reported, of all prompt tokens
    reused      the same as the engines know it, reported or not
    bound       the same for one cache that forgets nothing: all that an earlier prompt or answer
                of any conversation has in common with a prompt, in whole blocks
    same place  turns after the first that went where their conversation was
    error       |predicted - reported| cached tokens of a request: median, 95th percentile, worst
    trust       how far the gateway believed its index at the end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.build import Gateway
from gateway.config import GatewayConfig
from gateway.emulators import Emulator, Settings
from gateway.emulators.tokenizerfiles import write_tokenizer
from shared.bytetok import byte_bundle
from shared.logs import configure
from shared.settings import LogConfig, load

FLEET = 4
MODEL = "emulated"
THINK_S = 0.05
"""Between an answer and the next turn of its conversation."""
FLEETS: dict[str, dict[str, Any]] = {
    "vllm 0.33 (map)": {"engine": "vllm"},
    "vllm 0.23 (array)": {"engine": "vllm", "form": "array"},
    "vllm, blocks of 784": {"engine": "vllm", "block_size": 784, "blocks": 300},
    "vllm, no replay": {"engine": "vllm", "replay": False},
    "vllm, no events": {"engine": "vllm", "events": False},
    "sglang 0.5.23 (map)": {"engine": "sglang"},
    "sglang 0.5.16 (array)": {"engine": "sglang", "form": "array"},
    "sglang, pages of 1": {"engine": "sglang", "block_size": 1, "blocks": 65_536},
    "sglang, no events": {"engine": "sglang", "events": False},
    "llamacpp": {"engine": "llamacpp", "slots": 8},
    "tgi": {"engine": "tgi"},
    "any OpenAI server": {"engine": "vllm", "events": False},
    "any OpenAI server, mute": {"engine": "vllm", "events": False, "report": False},
}
PLAIN = "any OpenAI server"
"""Fleets whose names begin so are told to the gateway as servers of no known make."""


def settings_of(
    fleet: list[Emulator], tokenizer: Path, *, plain: bool = False, **more: Any
) -> GatewayConfig:
    """A gateway in front of a fleet; ``plain``: which does not know its make."""
    static = []
    for emulator in fleet:
        told: dict[str, Any] = {"url": emulator.url}
        if plain:
            told["engine"] = "openai"
        elif emulator.settings.engine == "vllm":
            publisher = emulator.publisher
            told["events"] = "none" if publisher is None else f"tcp://127.0.0.1:{publisher.port}"
            if publisher is not None and publisher.replay_port:
                told["replay"] = f"tcp://127.0.0.1:{publisher.replay_port}"
        static.append(told)
    flags = {
        "listen.port": 0,
        "listen.admin_port": 0,
        "workers.health_interval_s": 0.25,
        "log.level": "error",
        "render.tokenizers": json.dumps({MODEL: str(tokenizer)}),
        "workers.static": json.dumps(static),
        **more,
    }
    return load(GatewayConfig, file=None, env={}, flags=flags)


@dataclass
class Tally:
    """What was seen in one fleet's run."""

    prompt: int = 0
    delivered: int = 0
    bound: int = 0
    later_turns: int = 0
    same_place: int = 0
    errors: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    unreported: int = 0


@dataclass
class Bound:
    """One cache that forgets nothing, in blocks of one size."""

    size: int
    known: set[int] = field(default_factory=set)

    def look_up(self, tokens: list[int]) -> int:
        """Reusable tokens of a prompt."""
        held = 0
        for key in self._chain(tokens[: (len(tokens) - 1) // self.size * self.size]):
            if key not in self.known:
                break
            held += self.size
        return held

    def add(self, tokens: list[int]) -> None:
        """A prompt with its answer."""
        self.known.update(self._chain(tokens))

    def _chain(self, tokens: list[int]) -> list[int]:
        keys, state = [], 0
        for at in range(0, len(tokens) - self.size + 1, self.size):
            state = hash((state, tuple(tokens[at : at + self.size])))
            keys.append(state)
        return keys


async def chat(
    session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], limit: int
) -> tuple[str, dict[str, Any], dict[str, str], float]:
    """One streamed turn: text, usage, headers, seconds to the first content."""
    body = {"model": MODEL, "messages": messages, "max_tokens": limit, "stream": True}
    body["stream_options"] = {"include_usage": True}
    begun, first = asyncio.get_running_loop().time(), 0.0
    text, usage = "", {}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                first = first or (asyncio.get_running_loop().time() if piece else 0.0)
                text += piece
        return text, usage, dict(response.headers), first - begun


async def converse(
    url: str, fleet: list[Emulator], tally: Tally, conversations: int, turns: int, seed: int
) -> None:
    """All conversations, ``FLEET`` at a time, turn by turn in random order."""
    rng = random.Random(seed)
    bound = Bound(fleet[0].settings.block_size if fleet[0].settings.engine != "llamacpp" else 1)
    renderer = fleet[0].renderer
    waiting = [i for i in range(conversations) for _ in range(turns)]
    rng.shuffle(waiting)
    system = [prose(rng, 1000) for _ in range(conversations)]
    histories = [[{"role": "system", "content": text}] for text in system]
    places: dict[int, str] = {}
    busy: set[int] = set()

    async def take_turns(session: aiohttp.ClientSession) -> None:
        while waiting:
            which = next((i for i in waiting if i not in busy), None)
            if which is None:
                await asyncio.sleep(0.005)
                continue
            waiting.remove(which)
            busy.add(which)
            history = histories[which]
            history.append({"role": "user", "content": prose(rng, 60)})
            prompt = renderer.encode_text(render(renderer, history), add_special_tokens=False)
            tally.bound += bound.look_up(prompt)
            text, usage, headers, ttft = await chat(session, url, history, 24)
            history.append({"role": "assistant", "content": text})
            bound.add(prompt + renderer.encode_text(text, add_special_tokens=False)[:-1])
            note(tally, usage, headers, places, which)
            tally.ttft.append(ttft)
            await asyncio.sleep(THINK_S)
            busy.discard(which)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(take_turns(session) for _ in range(FLEET)))


def render(renderer: Any, history: list[dict[str, str]]) -> str:
    """Text of a chat."""
    from shared.openai import RouteKind, parse

    body = json.dumps({"model": MODEL, "messages": history}).encode()
    return str(renderer.render_chat(parse(RouteKind.CHAT, body)))


def note(
    tally: Tally, usage: dict[str, Any], headers: dict[str, str], places: dict[int, str], which: int
) -> None:
    """Count one answer."""
    lower = {name.lower(): value for name, value in headers.items()}
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    tally.prompt += usage["prompt_tokens"]
    tally.delivered += cached or 0
    tally.unreported += cached is None
    tally.errors.append(abs(int(lower["x-headwater-matched-tokens"]) - (cached or 0)))
    worker = lower["x-headwater-worker"]
    if which in places:
        tally.later_turns += 1
        tally.same_place += places[which] == worker
    places[which] = worker


def prose(rng: random.Random, size: int) -> str:
    """Words, about ``size`` characters."""
    return " ".join("".join(rng.choices("abcdefghij", k=7)) for _ in range(size // 8))


async def run_fleet(
    name: str, tokenizer: Path, conversations: int, turns: int, seed: int
) -> dict[str, Any]:
    """One row of the table."""
    fleet = [Emulator(Settings(model=MODEL, **FLEETS[name])) for _ in range(FLEET)]
    for emulator in fleet:
        await emulator.start()
    gateway = Gateway(settings_of(fleet, tokenizer, plain=name.startswith(PLAIN)))
    tally = Tally()
    try:
        await gateway.start()
        await gateway.until_ready()
        begun = asyncio.get_running_loop().time()
        believed = await settle(gateway, fleet[0].settings.publishes)
        settled_s = asyncio.get_running_loop().time() - begun
        await converse(gateway.url, fleet, tally, conversations, turns, seed)
        workers = gateway.router.workers(asyncio.get_running_loop().time())
        trust = sorted({str(worker.trust) for worker in workers})
        reasons = sorted({worker.trust_reason for worker in workers})
        reused = sum(one.counters.cached_tokens for one in fleet)
    finally:
        await gateway.close()
        for emulator in fleet:
            await emulator.stop()
    errors = sorted(tally.errors)
    return {
        "fleet": name,
        "delivered": tally.delivered / tally.prompt,
        "reused": reused / tally.prompt,
        "bound": tally.bound / tally.prompt,
        "same_place": tally.same_place / max(1, tally.later_turns),
        "error_p50": statistics.median(errors),
        "error_p95": errors[int(0.95 * len(errors))],
        "error_max": errors[-1],
        "block": fleet[0].settings.block_size,
        "trust": "/".join(trust),
        "why": "; ".join(reasons),
        "settled_s": settled_s if believed else None,
        "ttft_ms": 1e3 * statistics.mean(tally.ttft),
        "unreported": tally.unreported,
    }


async def settle(gateway: Gateway, exact: bool) -> bool:
    """Wait until all workers are believed exactly, where that can be."""
    for _ in range(200 if exact else 4):
        now = asyncio.get_running_loop().time()
        workers = gateway.router.workers(now)
        if len(workers) == FLEET and all(str(worker.trust) == "exact" for worker in workers):
            return True
        await asyncio.sleep(0.1)
    return False


def show(rows: list[dict[str, Any]]) -> None:
    """The table in Markdown."""
    head = ("fleet of 4", "delivered", "reused", "bound", "same place", "error p50/p95/max")
    print("| " + " | ".join([*head, "block", "trust"]) + " |")
    print("|---" * 8 + "|")
    for row in rows:
        shown = [f"{row[key]:.3f}" for key in ("delivered", "reused", "bound", "same_place")]
        error = f"{row['error_p50']:.0f}/{row['error_p95']:.0f}/{row['error_max']:.0f}"
        cells = [row["fleet"], *shown, error, str(row["block"]), f"{row['trust']}: {row['why']}"]
        print("| " + " | ".join(cells) + " |")


async def main(only: str, conversations: int, turns: int, seed: int) -> None:
    """All rows."""
    configure(LogConfig(level="error"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(byte_bundle(), Path(folder))
        for name in FLEETS:
            if only and only not in name:
                continue
            rows.append(await run_fleet(name, tokenizer, conversations, turns, seed))
            print(json.dumps(rows[-1]), flush=True)
    show(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a fleet's name")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asyncio.run(main(asked.only, asked.conversations, asked.turns, asked.seed))
