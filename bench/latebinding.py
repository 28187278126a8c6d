"""Does it help to keep requests back in the gateway while all workers are busy? In virtual time.

    python -P bench/latebinding.py              three traces, two loads each (about two minutes)

The simulator with and without ``admission.hold_ms``: a request is bound at once while some worker
has less than ``hold_wait_ms`` of prefill ahead and room for its KV, else it is matched and ranked
anew whenever something ends, for at most 250 ms (and, for comparison, 2 s).
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.admission import soon
from gateway.decision import Reject
from gateway.routing.base import Query
from gateway.routing.catalogue import FACTORIES
from gateway.sim.bounds import time_scale
from gateway.sim.files import block_size_of, load_trace
from gateway.sim.model import WorkerModel
from gateway.sim.replay import Replay, Served, _Kind, _Open
from gateway.sim.worker import Job, granule_keys
from shared.types import RequestId

SOON_S = 0.1
HOLDS_S = (0.0, 0.25, 2.0)
HERE = Path(__file__).resolve().parent
CELLS = (
    ("mooncake_conversation_h1.b512.jsonl.gz", 8, 1_000_000, 1500),
    ("sharegpt_a.b64.jsonl.gz", 8, 256_000, 2000),
    ("tau_airline_a.b16.jsonl.gz", 8, 128_000, 2000),
)
"""Trace, workers, KV tokens of each, requests read."""


class Held(Replay):
    """A run in which requests may be kept back for ``hold_s``."""

    hold_s = 0.0

    def run(self, on_progress: Callable[[int], None] = lambda done: None) -> Served:
        """As in :class:`Replay`."""
        self._waiting: list[tuple[int, float]] = []
        for number, request in enumerate(self._trace.requests):
            if request.first:
                self._expect(request.arrival_s * self._scale, _Kind.ARRIVES, number)
        begun = now = self._moments[0][0]
        while self._moments or self._waiting:
            expires = self._waiting[0][1] + self.hold_s if self._waiting else float("inf")
            if not self._moments or expires < self._moments[0][0]:
                now = max(now, expires)
            else:
                now, _, _, kind, number = heapq.heappop(self._moments)
                self._heartbeat(now)
                if kind is _Kind.ARRIVES:
                    self._waiting.append((number, now))
                elif kind is _Kind.FIRST_TOKEN:
                    self._go_on(self._first_token(number, now), now)
                else:
                    self._go_on(self._end(number, now), now)
            self._pump(now)
        busy = [worker.busy_s for worker in self._workers]
        return Served(self._ttft_s, self._cached, self._where, busy, now - begun)

    def _pump(self, now: float) -> None:
        while self._waiting:
            number, arrived = self._waiting[0]
            if not self._bind(number, arrived, now):
                return
            self._waiting.pop(0)

    def _bind(self, number: int, arrived: float, now: float) -> bool:
        request = self._trace.requests[number]
        query = Query(
            request_id=RequestId(str(number)),
            model="m",
            prompt_tokens=request.input_tokens,
            max_tokens=request.output_tokens,
            arrived=arrived,
            keys=granule_keys(request.path, self._trace.block_size),
        )
        route = self._router.decide(query, now)
        assert not isinstance(route, Reject)
        if now < arrived + self.hold_s and not soon(route, SOON_S):
            return False
        at = self._at[route.worker]
        lease = self._router.begin(route, now, attempt=1)
        job = Job(number, request)
        self._open[number] = _Open(job, at, lease, arrived)
        self._where[number] = at
        self._workers[at].put(job)
        self._go_on(self._workers[at], now)
        return True


def cell(name: str, workers: int, kv_tokens: int, limit: int, load: float) -> None:
    """One line for each time that requests are held."""
    path = HERE / "traces" / name
    block = block_size_of(path)
    assert block is not None
    trace = load_trace(path, block, limit)
    model = WorkerModel(kv_blocks=kv_tokens // block)
    scale = time_scale(trace, model, workers, load)
    for hold_s in HOLDS_S:
        run = Held(trace, model, workers, FACTORIES["cost"], scale, 1)
        run.hold_s = hold_s
        served = run.run()
        ttft = sorted(served.ttft_s)
        print(
            json.dumps(
                {
                    "trace": name.partition(".")[0],
                    "load": load,
                    "hold_ms": round(hold_s * 1e3),
                    "hit": round(sum(served.cached_tokens) / trace.input_tokens, 4),
                    "ttft_mean_ms": round(mean(ttft) * 1e3, 1),
                    "ttft_p99_ms": round(ttft[int(0.99 * len(ttft))] * 1e3, 1),
                }
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", default="0.7,0.9")
    loads = [float(load) for load in parser.parse_args().loads.split(",")]
    for name, workers, kv_tokens, limit in CELLS:
        for load in loads:
            cell(name, workers, kv_tokens, limit, load)


if __name__ == "__main__":
    main()
