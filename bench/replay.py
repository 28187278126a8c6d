"""Does a replay foretell what another policy does? Chats are recorded under ``cost`` on fake
workers, replayed under ``round_robin``, and served so; the two means are set side by side.

    python bench/replay.py --rounds 5

Each round takes about two minutes: a cluster of its own on free ports for each policy.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HEADWATER = [sys.executable, "-P", "-c", "import shared.cli; shared.cli.main()"]
LOAD = ("--workload", "multiturn", "--sessions", "40", "--turns", "4", "--rate", "1.5")


def free_port() -> int:
    """A port with room above it for a gateway's admin listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*arguments: str) -> dict[str, Any]:
    """A command's JSON."""
    done = subprocess.run([*HEADWATER, *arguments], capture_output=True, check=True, timeout=600)
    return json.loads(done.stdout)


def served(policy: str, seed: int, ledger: Path) -> float:
    """Mean time to first token of the load under a policy, seconds; the traffic is kept."""
    port = free_port()
    env = os.environ | {
        "HEADWATER_LEDGER__DIR": str(ledger),
        "HEADWATER_LEDGER__TRACE": "true",
        "HEADWATER_LEDGER__DECISIONS": "true",
    }
    up = subprocess.Popen(
        [*HEADWATER, "up", "--fake", "--workers", "3", "--port", str(port), "--policy", policy],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stdout is not None
        while not up.stdout.readline().startswith("ready"):
            if up.poll() is not None:
                raise SystemExit("the cluster did not start")
        url = f"http://127.0.0.1:{port}"
        told = run("bench", "--url", url, *LOAD, "--seed", str(seed), "--format", "json")
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)
    time.sleep(0.5)
    return float(told["runs"][0]["ttft"]["mean"]["value"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    errors = []
    print("round  recorded (cost)  same choice  foretold (round_robin)  measured  off by")
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder, "cost")
            before = served("cost", number, kept)
            told = run("replay", str(kept), "--policy", "cost,round_robin", "--format", "json")
            foretold = next(row for row in told["served"] if row["policy"] == "round_robin")
            same = next(row for row in told["decided"] if row["policy"] == "cost")
            after = served("round_robin", number, Path(folder, "round_robin"))
        mean = foretold["ttft"]["mean_s"]
        errors.append(mean / after - 1.0)
        print(
            f"{number:5}  {before * 1000:12.0f} ms  {same['same'] / same['decisions']:11.1%}"
            f"  {mean * 1000:19.0f} ms  {after * 1000:5.0f} ms  {errors[-1]:+6.1%}",
            flush=True,
        )
    print(f"median of {rounds}: off by {median(errors):+.1%}")


if __name__ == "__main__":
    main()
