"""Does ``headwater simulate`` agree with the judge (``trace_oracle.py``) on what both can run?

    python -P bench/simulator.py                  one cell of each trace (about three minutes)
    python -P bench/simulator.py --only tau -N 4,8 --loads 0.5,0.7,0.9

``round_robin``, ``random`` and ``least_outstanding`` draw the judge's random numbers here, so that
nothing but the two simulations can differ. For information: the product's own ``least_loaded``
(which is cleverer among equals), ``longest_prefix``, ``cache_aware`` and ``dynamo_linear`` beside
the judge's rules of that kind (ours count blocks as present that are booked, and see loads as a
gateway does; the judge's ``cache_aware`` has a tree of its own), and ``cost``, which is our router
as the judge's plug-in: there it learns of cache contents only when a prompt asks for them. Exit
code 1 if one of the first three is further off than 3 points of hit rate or 10 % of mean TTFT.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import trace_oracle  # noqa: E402 - a script beside this one, found through the line above

from gateway.routing.base import Candidate, Query, Scored  # noqa: E402
from gateway.routing.catalogue import FACTORIES  # noqa: E402
from gateway.sim.files import load_trace  # noqa: E402
from gateway.sim.model import WorkerModel  # noqa: E402
from gateway.sim.replay import Factory  # noqa: E402
from gateway.sim.simulate import simulate  # noqa: E402


class UniformChoice:
    """``random`` with the judge's draws."""

    name = "random"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """One draw, then the others."""
        chosen = rng.randrange(len(candidates))
        return [Scored(item, 0.0) for item in (*candidates[chosen:], *candidates[:chosen])]


class LeastOutstanding:
    """Fewest requests, equal ones at random with the judge's draws."""

    name = "least_outstanding"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """One draw among equals, then the others."""
        counts = [item.worker.requests for item in candidates]
        equal = [at for at, count in enumerate(counts) if count == min(counts)]
        chosen = equal[0] if len(equal) == 1 else rng.choice(equal)
        order = sorted(range(len(candidates)), key=lambda at: (at != chosen, counts[at], at))
        return [Scored(candidates[at], float(counts[at])) for at in order]


SAME: dict[str, Factory] = {
    "round_robin": FACTORIES["round_robin"],
    "random": lambda config, cost: UniformChoice(),
    "least_outstanding": lambda config, cost: LeastOutstanding(),
}
"""Under the judge's names."""
NEAR = {
    "cost": "plugin:bench.judge:HeadwaterPolicy",
    "least_loaded": "least_outstanding",
    "longest_prefix": "exact_lpm",
    "cache_aware": "cache_aware",
    "dynamo_linear": "dynamo_cost",
}
"""Ours, and the judge's rule of the same kind, which knows other things of the workers."""
OURS: dict[str, Factory] = {name: FACTORIES[name] for name in NEAR}
CELLS: dict[str, tuple[str, int, float, int, float]] = {
    "tau": ("tau_airline_a.b16.jsonl.gz", 4, 128_000, 16, 2_000.0),
    "mooncake": ("mooncake_conversation_h1.b512.jsonl.gz", 8, 1_000_000, 512, 10_000.0),
    "sharegpt": ("sharegpt_a.b64.jsonl.gz", 8, 1_000_000, 64, 2_000.0),
}
HIT_POINTS, TTFT_SHARE = 3.0, 0.10


def judged(path: Path, policies: Sequence[str], flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The judge's records by policy; what it prints goes to stderr."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out, redirect_stdout(sys.stderr):
        trace_oracle.main(
            [str(path), *flags, "--policies", ",".join(policies), "--jsonl", out.name]
        )
        rows = map(json.loads, Path(out.name).read_text().splitlines())
        return {row["policy"]: row for row in rows}


def compare(name: str, workers: int, load: float, seed: int) -> bool:
    """Print one cell; True: it agrees."""
    file, _, capacity, block_size, rate = CELLS[name]
    path = HERE / "traces" / file
    flags = f"-N {workers} --caps {capacity} --loads {load} -P {rate} --seed {seed}".split()
    theirs = judged(path, list(dict.fromkeys([*SAME, *NEAR.values()])), flags)
    trace = load_trace(path, block_size)
    # Less than the largest request the judge does not take either.
    blocks = max(capacity // block_size, trace.most_blocks + 8)
    model = WorkerModel(kv_blocks=blocks, prefill_tokens_per_s=rate)
    ours = simulate(name, trace, model, workers, SAME | OURS, load=load, seed=seed)
    bounds, reference = ours.bounds, theirs["random"]
    print(
        f"\n{name}, {workers} workers of {capacity:,} tokens, load {load:g}, seed {seed}; "
        f"judge | here\n  infinite cache {reference['inf_hit']:.4f} | "
        f"{bounds.infinite_hit_rate:.4f}, pooled LRU {reference['lru']:.4f} | "
        f"{bounds.pooled_hit_rate:.4f}, its queue's mean TTFT {reference['ref_mean']:.4f} | "
        f"{bounds.ttft_pooled.mean_s:.4f} s"
    )
    good = True
    for result in ours.policies:
        other = theirs[NEAR.get(result.policy, result.policy)]
        points = 100 * (result.hit_rate - other["hit"])
        share = result.ttft.mean_s / other["mean"] - 1
        fits = abs(points) <= HIT_POINTS and abs(share) <= TTFT_SHARE
        good = good and (fits or result.policy not in SAME)
        print(
            f"  {result.policy:18} hits {100 * other['hit']:6.2f} | {100 * result.hit_rate:6.2f} % "
            f"({points:+.2f})  mean TTFT {other['mean']:8.4f} | {result.ttft.mean_s:8.4f} s "
            f"({100 * share:+.1f} %){'' if fits else '  APART'}",
            flush=True,
        )
    return good


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", choices=sorted(CELLS), action="append")
    parser.add_argument("-N", default="", help="workers, comma separated")
    parser.add_argument("--loads", default="0.7", help="comma separated")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    good = True
    for name in asked.only or list(CELLS):
        for workers in map(int, asked.N.split(",") if asked.N else [str(CELLS[name][1])]):
            for load in map(float, asked.loads.split(",")):
                good = compare(name, workers, load, asked.seed) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
