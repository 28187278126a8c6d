"""How long a report over a large ledger takes, and how much memory.

    python -P bench/report.py                       five million records (about two minutes)
    python -P bench/report.py --records 200000      quicker
    python -P bench/report.py --ledger DIR          a ledger made before (or make it there)

Goals: 20 s and 1 GiB. The ledger is that of a busy day: 16 workers, 300 prefix families of several
turns, every kind of loss, retries and rejections. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gateway.ledgerline import encode_record  # noqa: E402 - found through the line above
from gateway.records import Outcome, RequestRecord, Shadow, TokenFlow, Why  # noqa: E402

GOAL_S = 20.0
GOAL_MIB = 1024
SHAPES = 100_000
"""Different records; lines differ from each other in time and id beside."""
PER_FILE = 500_000
START = 1_785_196_800.0
_AT, _ID = 1111111111.125, "req-" + "0" * 24


def shape(rng: Random) -> RequestRecord:
    """One record; half of all losses are none, as on a healthy cluster."""
    family = min(299, int(rng.expovariate(1 / 60)))
    turns = min(12, 1 + int(rng.expovariate(1 / 3)))
    prompt = 200 + 40 * (family % 17) + turns * 220 + rng.randrange(200)
    tail = prompt % 16 or 16
    matchable = prompt - tail
    seen = min(matchable, rng.choice((0, 512, 512, matchable // 2, matchable // 8 * 7)) // 16 * 16)
    evicted = seen if rng.random() < 0.04 else 0
    available = seen - evicted
    load = available if rng.random() < 0.05 else 0
    captured = available - load
    stale = captured // 32 * 16 if rng.random() < 0.01 else 0
    delivered = captured - stale
    worker, other = rng.sample(range(16), 2)
    ttft = 0.02 + (prompt - delivered) * 1e-4 + rng.expovariate(20)
    flow = TokenFlow(
        prompt=prompt, tail=tail, cold=matchable - seen, evicted=evicted, available=available,
        captured=captured, diverted_for_load=load, delivered=delivered, stale_index=stale,
    )  # fmt: skip
    fate = rng.random()
    values = {
        "at": _AT, "request_id": _ID, "attempt": 1, "final": True, "route": "/v1/chat/completions",
        "model": ("llama-3.1-8b", "qwen-2.5-7b")[family % 2], "tenant": f"t{family % 9}",
        "family": f"{family * 2654435761 & 0xFFFFFFFF:08x}", "policy": "cost",
        "path": tuple(
            hash((family, level, turns if level > 1 else 0, rng.random() if level > 2 else 0))
            & 0xFFFFFF
            for level in range(7) if 128 << level <= prompt
        ),
        "worker": f"10.0.0.{worker}:8100", "trust": "exact" if fate < 0.97 else "learned",
        "flow": flow, "output_tokens": 1 + int(rng.expovariate(1 / 150)), "decided_s": 0.0004,
        "ttft_s": ttft, "total_s": ttft + 1.5, "itl_s": 0.01 + rng.random() / 100,
        "predicted_ttft_s": ttft * rng.uniform(0.6, 1.5), "reported": True,
        "prompt_tokens": prompt, "matched_tokens": captured,
        "why": Why(
            code="cheaper" if load else "holder", term="own", gap=rng.random(),
            other=f"10.0.0.{other}:8100", other_matched=seen,
        ),
        "round_robin": Shadow(matched_tokens=captured // 4, ttft_s=ttft * 1.8),
    }  # fmt: skip
    if fate < 0.005:
        values |= {"final": False, "flow": TokenFlow(), "outcome": Outcome.UPSTREAM_ERROR,
                   "status": 502, "ttft_s": None}  # fmt: skip
    elif fate < 0.007:
        values |= {"attempt": 0, "flow": TokenFlow(), "outcome": Outcome.REJECTED, "status": 503,
                   "worker": "", "why": Why(code="rejected"), "ttft_s": None}  # fmt: skip
    return RequestRecord(**values)  # type: ignore[arg-type]  # a table of values


def make(folder: Path, records: int) -> None:
    """Write a ledger of some hundred MB a million."""
    rng = Random(1)
    shapes = []
    for _ in range(min(SHAPES, records)):
        line = encode_record(shape(rng), b"bench")
        head, _, rest = line.partition(str(_AT).encode())
        middle, _, tail = rest.partition(_ID.encode())
        shapes.append((head, middle, tail))
    folder.mkdir(parents=True, exist_ok=True)
    day = 86_400.0 / records
    for first in range(0, records, PER_FILE):
        with (folder / f"20260728T{first // PER_FILE:06}.000000Z-8000.jsonl").open("wb") as file:
            for number in range(first, min(first + PER_FILE, records)):
                head, middle, tail = shapes[rng.randrange(len(shapes))]
                at = b"%.3f" % (START + number * day)
                file.write(b"%b%b%breq-%024x%b" % (head, at, middle, number, tail))


def measure(arguments: list[str]) -> tuple[float, float]:
    """(wall seconds, largest resident MiB) of a command; raises if it fails."""
    begun = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", "from shared.cli import main; main()", "report", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"headwater report failed with {child.returncode}")
    return time.monotonic() - begun, usage.ru_maxrss / 1024


def main() -> int:
    """Make the ledger, report it in each form, print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--ledger", type=Path)
    parser.add_argument("--forms", default="json,html")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.ledger or Path(scratch) / "ledger"
        if not folder.exists():
            make(folder, options.records)
        size = sum(file.stat().st_size for file in folder.iterdir())
        result: dict[str, object] = {"records": options.records, "ledger_mib": size / 2**20}
        good = True
        for form in options.forms.split(","):
            out = Path(scratch) / f"report.{form}"
            wall, rss = measure([str(folder), "--format", form, "-o", str(out)])
            result[form] = {"wall_s": round(wall, 2), "max_rss_mib": round(rss)}
            good = good and wall <= GOAL_S and rss <= GOAL_MIB
        print(json.dumps(result, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
