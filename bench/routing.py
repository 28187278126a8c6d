"""The routing goals on the shared traces: our policy beside the judge's, one fixed configuration.

    python -P bench/routing.py                  all cells (about 15 minutes on one core)
    python -P bench/routing.py --only tau       one trace

Hit rates are relative to one pooled LRU of the same memory, times to one FIFO queue with its hits.
Cells whose reference utilisation (prefill work with those hits, over the span of arrivals) is 0.95
or more are not stable and left out of the summary.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import trace_oracle  # noqa: E402 - a script beside this one, found through the line above

OURS = "plugin:bench.judge:HeadwaterPolicy"
PEERS = ("session_sticky", "least_outstanding", "cache_aware", "exact_lpm")
MOST_BUSY = 0.95
GRIDS: dict[str, tuple[str, list[str]]] = {
    "mooncake": (
        "mooncake_conversation_h1.b512.jsonl.gz",
        "-N 4,8,16,64 --caps 250000,1000000,4000000 --loads 0.5,0.7,0.9".split(),
    ),
    "sharegpt": (
        "sharegpt_a.b64.jsonl.gz",
        "-P 2000 -N 4,8,16 --caps 256000,1000000 --loads 0.5,0.9".split(),
    ),
    "tau": (
        "tau_airline_a.b16.jsonl.gz",
        "-P 2000 -N 4,8 --caps 32000,128000 --loads 0.5,0.9".split(),
    ),
}
MUST = {
    "hit": "median >= 96 %, worst >= 90 %",
    "mooncake mean": "<= 1.5 / 2.6",
    "sharegpt mean": "<= 2.0 / 2.4",
    "tau mean": "<= 1.4 / 2.2",
    "mooncake p99": "<= 1.25 / 1.6",
    "p99": "worst <= 6.3",
    "against the better of sticky and least outstanding": "worst <= 1.05",
}


def run(name: str, policies: tuple[str, ...]) -> list[dict[str, Any]]:
    """All runs of one trace, as the judge records them, with the reference utilisation."""
    file, flags = GRIDS[name]
    path = str(HERE / "traces" / file)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        trace_oracle.main([path, *flags, "--policies", ",".join(policies), "--jsonl", out.name])
        rows = [json.loads(line) for line in Path(out.name).read_text().splitlines()]
    trace = trace_oracle.load_trace(path)
    starts = [at for at, first in zip(trace.t, trace.first, strict=True) if first]
    span = starts[-1] - starts[0]
    rate = 10_000.0 if name == "mooncake" else 2_000.0
    tokens = sum(trace.inp)
    for row in rows:
        work = tokens * (1 - row["lru"]) / rate + trace.n * 0.005
        row |= {"name": name, "busy": work / (row["N"] * span * row["scale"])}
    return rows


def ratios(rows: list[dict[str, Any]], policy: str) -> dict[str, list[float]]:
    """Figures of one policy over the stable cells."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        cells[row["name"], row["N"], row["cap"], row["load"]][row["policy"]] = row
    found: dict[str, list[float]] = defaultdict(list)
    for cell in cells.values():
        row = cell[policy]
        if row["busy"] >= MOST_BUSY:
            continue
        better = min(cell[peer]["mean"] for peer in PEERS[:2])
        found["hit"].append(100 * row["hit"] / row["lru"])
        found[f"{row['name']} mean"].append(row["mean"] / row["ref_mean"])
        if row["name"] == "mooncake":
            found["mooncake p99"].append(row["p99"] / row["ref_p99"])
        found["p99"].append(row["p99"] / row["ref_p99"])
        found["against the better of sticky and least outstanding"].append(row["mean"] / better)
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", choices=sorted(GRIDS), action="append")
    chosen = parser.parse_args().only or list(GRIDS)
    rows = [row for name in chosen for row in run(name, (*PEERS, OURS))]
    for policy in (*PEERS, OURS):
        print(f"\n{'headwater cost' if policy == OURS else policy}: median / worst")
        for name, values in ratios(rows, policy).items():
            worst = min(values) if name == "hit" else max(values)
            print(f"  {name:52} {median(values):7.2f} / {worst:7.2f}   must: {MUST[name]}")


if __name__ == "__main__":
    main()
