"""Does a replay foretell what another policy does? Chats are recorded under ``cost`` on fake
workers, replayed under ``round_robin``, and served so; the two means are set side by side.

    python -P bench/replay.py --rounds 5

Each round takes about a minute: a cluster of its own on free ports for each policy. What else runs
on the machine delays the fakes beyond what they model: then give it priority (``chrt -r 15``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from lab import HEADWATER, cluster  # noqa: E402

LOAD = ("--workload", "multiturn", "--sessions", "28", "--turns", "4", "--rate", "1.5")
BOUND = 0.15
"""So far a foretold mean may be from the measured one, median of the rounds."""


async def run(*arguments: str) -> dict[str, Any]:
    """A command's JSON."""
    process = await asyncio.create_subprocess_exec(
        HEADWATER, *arguments, "--format", "json", stdout=asyncio.subprocess.PIPE
    )
    told, _ = await asyncio.wait_for(process.communicate(), 600)
    if process.returncode:
        raise SystemExit(f"headwater {arguments[0]} failed")
    found: dict[str, Any] = json.loads(told)
    return found


async def served(policy: str, seed: int, ledger: Path) -> float:
    """Mean time to first token of the load under a policy, seconds; the traffic is kept."""
    env = {
        "HEADWATER_LEDGER__DIR": str(ledger),
        "HEADWATER_LEDGER__TRACE": "true",
        "HEADWATER_LEDGER__DECISIONS": "true",
    }
    async with cluster("--fake", "--policy", policy, workers=3, env=env) as live:
        told = await run("bench", "--url", live.url, *LOAD, "--seed", str(seed))
    client = told["runs"][0]["client"]
    if client["limiting"]:
        print(f"  the load generator was the bottleneck under {policy}: {client}", flush=True)
    return float(told["runs"][0]["ttft"]["mean"]["value"])


async def one_round(seed: int, folder: Path) -> float:
    """Record, foretell, serve; how far the foretold mean is off."""
    kept = folder / f"{seed}-cost"
    before = await served("cost", seed, kept)
    told = await run("replay", str(kept), "--policy", "cost,round_robin")
    rows = {row["policy"]: row["ttft"]["mean_s"] for row in told["served"]}
    same = next(row for row in told["decided"] if row["policy"] == "cost")
    after = await served("round_robin", seed, folder / f"{seed}-round_robin")
    off = float(rows["round_robin"] / after - 1.0)
    print(
        f"{seed:5}  {before * 1000:5.0f} ms  {rows['recorded'] * 1000:6.0f} ms"
        f"  {same['same'] / same['decisions']:11.1%}"
        f"  {rows['round_robin'] * 1000:19.0f} ms  {after * 1000:5.0f} ms  {off:+6.1%}",
        flush=True,
    )
    return off


async def main() -> None:
    """Rounds, and the median of how far each was off; exit code 1 if that is too far."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder for what was recorded")
    asked = parser.parse_args()
    print("       recorded under cost")
    print("round     live  simulated  same choice  foretold (round_robin)  measured  off by")
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        errors = [await one_round(number, folder) for number in range(1, asked.rounds + 1)]
    print(f"median of {asked.rounds}: off by {median(errors):+.1%}")
    if abs(median(errors)) > BOUND:
        raise SystemExit(f"more than {BOUND:.0%}")


if __name__ == "__main__":
    asyncio.run(main())
