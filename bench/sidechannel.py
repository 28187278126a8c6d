"""Can a tenant tell from its own answers what another one sent? With isolation and without.

    python -P bench/sidechannel.py [--trials 60]

One worker with modelled delays and a gateway with two keys. In each trial a coin decides whether
the victim sends a secret prompt, or another one of the same length; then the spy sends the secret
prompt and keeps all that it can see: seconds to its first token, ``cached_tokens``, and the
predicted match in the headers. For each of these the area under the ROC curve says how well it
tells the trials apart (0.5: not at all, 1: without error), and a permutation test how likely as
much would be by chance. With isolation that is done three times: the second time with prompts that
begin with an approved one (``[tenancy] shared_prompts``), whose blocks all tenants share, the third
time with long ones, whose text takes milliseconds to encode.

Exit code 1 unless, with isolation, no signal is beyond chance (p < 0.001) and of the approved
beginning all full blocks are shared and not one more; and unless, without it, every signal tells
the trials apart (area above 0.9, p < 0.001): a test that sees nothing there would prove nothing.
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
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

import aiohttp  # noqa: E402
from caserig import GatewayProcess  # noqa: E402
from livelab import lab  # noqa: E402

SIGNALS = ("seconds", "cached_tokens", "matched_tokens")
KEYS = {"victim": "sk-victim", "spy": "sk-spy"}
WORDS, MANY_WORDS = 120, 480
SHUFFLES = 4000
BEYOND = 1e-3
"""A result as clear as this is no chance."""
CLEAR = 0.9
BLOCK = 16
APPROVED = "You answer for the shop, in two sentences, and never speak of prices. " * 6
"""As many tokens as characters."""
SETTINGS = (
    ("auto", "", WORDS),
    ("auto", APPROVED, WORDS),
    ("auto", "", MANY_WORDS),
    ("off", "", WORDS),
)
"""Isolation, how all prompts begin, and how many words of its own each has."""
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


def prompt(rng: random.Random, words: int) -> str:
    """As long as any other, and new."""
    return " ".join(f"{rng.getrandbits(20):06x}" for _ in range(words))


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


def unshared(trials: Sequence[Trial], begin: str) -> list[str]:
    """What is wrong with how an approved beginning is shared. Pure."""
    full = len(begin) // BLOCK * BLOCK
    seen = sorted({one.cached_tokens for one in trials})
    print(f"  of {len(begin)} approved tokens are shared: {seen}", flush=True)
    return [] if seen == [full] else [f"of {len(begin)} approved tokens {seen} are shared"]


async def spy_on(
    gateway: GatewayProcess, many: int, seed: int, begin: str = "", words: int = WORDS
) -> list[Trial]:
    """So many trials, half of them with the secret; all prompts begin with ``begin``."""
    rng = random.Random(seed)
    coins = [number % 2 == 0 for number in range(many)]
    rng.shuffle(coins)
    trials = []
    async with aiohttp.ClientSession() as session:
        for _ in range(3):  # what all share, if anything, is there before the first trial
            await ask(session, gateway.url, "victim", begin + prompt(rng, words))
            await asyncio.sleep(0.5)
        for sent in coins:
            secret, other = (begin + prompt(rng, words) for _ in range(2))
            await ask(session, gateway.url, "victim", secret if sent else other)
            await asyncio.sleep(0.1)  # for events to be known: the spy's best case
            trials.append(Trial(sent, *await ask(session, gateway.url, "spy", secret)))
    return trials


async def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "approved.json"
        file.write_text(json.dumps({"prompt": APPROVED}))
        wrong = await try_all(options.trials, str(file))
    for line in wrong:
        print(f"FAULT {line}")
    return 1 if wrong else 0


async def try_all(many: int, approved: str) -> list[str]:
    """What is wrong in any of the settings; ``approved``: a file with ``APPROVED``."""
    wrong: list[str] = []
    keys = {"HEADWATER_LISTEN__API_KEYS": ",".join(KEYS.values())}
    async with lab(1, lambda server: server.url, speed=MODELLED) as it:
        for isolation, begin, words in SETTINGS:
            env = {**keys, "HEADWATER_TENANCY__ISOLATION": isolation}
            if begin:
                env["HEADWATER_TENANCY__SHARED_PROMPTS"] = approved
            gateway = await asyncio.to_thread(
                lambda env=env: it.launch_gateway(redis=it.redis.url, env=env)
            )
            await asyncio.to_thread(gateway.await_exact, 1, 60)
            what = ", behind an approved beginning" if begin else ""
            print(f"isolation {isolation}{what}, {words} words, {many} trials", flush=True)
            trials = await spy_on(gateway, many, len(isolation), begin, words)
            wrong += verdict(trials, isolated=isolation == "auto")
            if begin:
                wrong += unshared(trials, begin)
            gateway.stop()
    return wrong


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
