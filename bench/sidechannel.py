"""Can a tenant tell from its own answers what another one sent? With isolation and without.

    python -P bench/sidechannel.py [--trials 60]

One worker with modelled delays and a gateway with two keys. In each trial a coin decides whether
the victim sends a secret prompt, or another one of the same length; then the spy sends the secret
prompt and keeps all that it can see: seconds to its first token, ``cached_tokens``, and the
predicted match in the headers. For each of these the area under the ROC curve says how well it
tells the trials apart (0.5: not at all, 1: without error), and a permutation test how likely as
much would be by chance.

Exit code 1 unless, with isolation, no signal is beyond chance (p < 0.001), and without it every
signal tells the trials apart (area above 0.9, p < 0.001): a test that sees nothing there would
prove nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

import aiohttp  # noqa: E402
from caserig import GatewayProcess  # noqa: E402
from livelab import lab  # noqa: E402

SIGNALS = ("seconds", "cached_tokens", "matched_tokens")
KEYS = {"victim": "sk-victim", "spy": "sk-spy"}
WORDS = 120
SHUFFLES = 4000
BEYOND = 1e-3
"""A result as clear as this is no chance."""
CLEAR = 0.9
MODELLED = {"HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "150"}


@dataclass(frozen=True)
class Trial:
    """What the spy saw, and the truth."""

    sent: bool
    seconds: float
    cached_tokens: float
    matched_tokens: float


def area(yes: Sequence[float], no: Sequence[float]) -> float:
    """Chance that one of ``yes`` is above one of ``no``, ties counting half. Pure."""
    wins = sum((a > b) + 0.5 * (a == b) for a in yes for b in no)
    return wins / (len(yes) * len(no))


def by_chance(yes: Sequence[float], no: Sequence[float], rng: random.Random) -> float:
    """Share of random divisions that are at least as far from 0.5 as this one. Pure."""
    both, found = [*yes, *no], abs(area(yes, no) - 0.5)
    ranks = _ranks(both)
    size, pairs = len(yes), len(yes) * len(no)
    as_far = 0
    for _ in range(SHUFFLES):
        rng.shuffle(ranks)
        above = sum(ranks[:size]) - size * (size + 1) / 2
        as_far += abs(above / pairs - 0.5) >= found - 1e-12
    return (as_far + 1) / (SHUFFLES + 1)


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in order, equal values sharing theirs."""
    order = sorted(values)
    first = {value: order.index(value) for value in set(order)}
    return [first[value] + (order.count(value) + 1) / 2 for value in values]


def verdict(trials: Sequence[Trial], *, isolated: bool) -> list[str]:
    """What is wrong; prints what was found. Pure but for that."""
    rng, wrong = random.Random(7), []
    for name in SIGNALS:
        yes = [getattr(one, name) for one in trials if one.sent]
        no = [getattr(one, name) for one in trials if not one.sent]
        if min(len(yes), len(no)) < 8:
            return ["too few trials to tell"]
        if name == "seconds":  # a hit is quicker
            yes, no = no, yes
        found, p = area(yes, no), by_chance(yes, no, rng)
        print(f"  {name}: area {found:.3f}, p {p:.4f}", flush=True)
        if isolated and p < BEYOND:
            wrong.append(f"{name} tells what another tenant sent: area {found:.3f}, p {p:.4f}")
        if not isolated and (found < CLEAR or p >= BEYOND):
            wrong.append(f"without isolation {name} shows nothing: the test is blind")
    return wrong


def prompt(rng: random.Random) -> str:
    """As long as any other, and new."""
    return " ".join(f"{rng.getrandbits(20):06x}" for _ in range(WORDS))


async def ask(
    session: aiohttp.ClientSession, url: str, who: str, text: str
) -> tuple[float, float, float]:
    """Seconds to the first token, cached tokens, matched tokens."""
    body = {
        "model": "fake",
        "prompt": text,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    headers = {"Authorization": f"Bearer {KEYS[who]}"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        reply.raise_for_status()
        first = await reply.content.readany()
        seconds = time.perf_counter() - begun
        rest = first + await reply.read()
        matched = float(reply.headers.get("x-headwater-matched-tokens", 0))
    last = [line for line in rest.splitlines() if b'"usage":{' in line][-1]
    usage = json.loads(last.removeprefix(b"data:"))["usage"]
    return seconds, float(usage["prompt_tokens_details"]["cached_tokens"]), matched


async def spy_on(gateway: GatewayProcess, many: int, seed: int) -> list[Trial]:
    """So many trials, half of them with the secret."""
    rng = random.Random(seed)
    coins = [number % 2 == 0 for number in range(many)]
    rng.shuffle(coins)
    trials = []
    async with aiohttp.ClientSession() as session:
        for sent in coins:
            secret, other = prompt(rng), prompt(rng)
            await ask(session, gateway.url, "victim", secret if sent else other)
            await asyncio.sleep(0.1)  # for events to be known: the spy's best case
            trials.append(Trial(sent, *await ask(session, gateway.url, "spy", secret)))
    return trials


async def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    options = parser.parse_args()
    wrong: list[str] = []
    env = {"HEADWATER_LISTEN__API_KEYS": ",".join(KEYS.values())}
    async with lab(1, lambda server: server.url, speed=MODELLED) as it:
        for isolation in ("auto", "off"):
            more = {"HEADWATER_TENANCY__ISOLATION": isolation}
            gateway = await asyncio.to_thread(
                lambda more=more: it.launch_gateway(redis=it.redis.url, env={**env, **more})
            )
            await asyncio.to_thread(gateway.await_exact, 1, 60)
            print(f"isolation {isolation}, {options.trials} trials", flush=True)
            trials = await spy_on(gateway, options.trials, seed=len(isolation))
            wrong += verdict(trials, isolated=isolation == "auto")
            gateway.stop()
    for line in wrong:
        print(f"FAULT {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
