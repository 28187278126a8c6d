"""Our router as a plug-in of ``bench/trace_oracle.py``, the independent judge of routing policies.

    python bench/trace_oracle.py bench/traces/tau_airline_a.b16.jsonl.gz -P 2000 -N 4,8 \\
        --policies session_sticky,plugin:bench.judge:HeadwaterPolicy     (from the project's root)

It drives the product's own ``Router`` under the judge's clock: workers join, tell their load each
second, and their cache events are made from what the judge says they hold of the prompt at hand.
Nothing is set per trace; the one thing told is that the judge's prefill has no quadratic term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Protocol

from gateway.config import RoutingConfig
from gateway.decision import AttemptEnd, Route
from gateway.index.table import PrefixTable
from gateway.lease import Lease
from gateway.records import Outcome
from gateway.router import Router
from gateway.routing.base import Query, Trust
from gateway.routing.catalogue import make_policies
from gateway.routing.cost import CostModel
from shared.blocks import stride_of
from shared.events import CacheEvent, EventBatch, Snapshot, removed, stored
from shared.load import WorkerInfo, WorkerLoad
from shared.openai import Usage
from shared.types import BlockKey, Epoch, RequestId, WorkerId

_HEARTBEAT_S = 1.0
_EPOCH = Epoch(1)


class View(Protocol):
    """What the judge lets a router ask; one entry per worker."""

    def matched_tokens(self, request: Mapping[str, Any]) -> list[int]: ...
    def running(self) -> list[int]: ...
    def waiting(self) -> list[int]: ...
    def used_blocks(self) -> list[int]: ...
    def queued_tokens(self) -> list[float]: ...


class HeadwaterPolicy:
    """One gateway with the default configuration, made anew for each run of the judge."""

    policy: str | None = None

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = info
        self._block: int = info["block_tokens"]
        self._stride = stride_of(self._block)
        config, cost = RoutingConfig(), CostModel(quadratic=0.0)
        self._index = PrefixTable(config.index_max_blocks, Random(info["seed"]))
        policies = make_policies(config, cost)
        self._router = Router(self._index, policies, config, Random(info["seed"]), cost=cost)
        self._workers = [WorkerId(f"w{n}") for n in range(info["n_workers"])]
        self._seqs = dict.fromkeys(self._workers, 0)
        self._leases: dict[int, Lease] = {}
        self._cached: dict[int, int] = {}
        self._first: dict[int, float] = {}
        self._told = float("-inf")
        for worker in self._workers:
            self._join(worker)

    def route(self, request: Mapping[str, Any], view: View) -> int:
        """The judge's question: index of the worker for a request."""
        now: float = request["now"]
        if now - self._told >= _HEARTBEAT_S:
            self._told = now
            self._heartbeat(view, now)
        keys = self._keys(request["blocks"])
        self._follow(keys, request, view.matched_tokens(request), now)
        query = Query(
            request_id=RequestId(str(request["id"])),
            model="m",
            prompt_tokens=request["input_length"],
            max_tokens=request["output_length"],
            arrived=now,
            keys=keys,
        )
        route = self._router.decide(query, now, policy=self.policy)
        if not isinstance(route, Route):
            raise TypeError(f"rejected: {route.reason}")
        self._leases[request["id"]] = self._router.begin(route, now, attempt=1)
        return self._workers.index(route.worker)

    def first_token(self, request: Mapping[str, Any], worker: int, now: float, cached: int) -> None:
        """Told by the judge: prefill has ended."""
        self._cached[request["id"]], self._first[request["id"]] = cached, now
        self._leases[request["id"]].first_token(now)

    def finished(self, request: Mapping[str, Any], worker: int, now: float) -> None:
        """Told by the judge: the answer has ended."""
        number, output = request["id"], request["output_length"]
        end = AttemptEnd(
            outcome=Outcome.OK,
            status=200,
            usage=Usage(request["input_length"], output, self._cached.pop(number)),
            itl_s=(now - self._first.pop(number)) / output,
            wall_at=now,
        )
        self._leases.pop(number).finish(end, now)

    # ---------------------------------------------------------------- what a worker would tell

    def _join(self, worker: WorkerId) -> None:
        blocks: int = self._info["blocks_per_worker"]
        self._router.join(
            WorkerInfo(
                id=worker,
                epoch=_EPOCH,
                url=f"http://{worker}",
                models=("m",),
                block_size=self._block,
                blocks_total=blocks,
            ),
            0.0,
        )
        self._feed(worker, Snapshot(b""), 0.0)
        self._router.set_trust(worker, Trust.EXACT, "events flow", 0.0)

    def _heartbeat(self, view: View, now: float) -> None:
        rows = zip(
            self._workers,
            view.running(),
            view.waiting(),
            view.queued_tokens(),
            view.used_blocks(),
            strict=True,
        )
        for worker, running, waiting, queued, used in rows:
            load = WorkerLoad(
                running=running,
                waiting=waiting,
                queued_prefill_tokens=int(queued),
                blocks_total=self._info["blocks_per_worker"],
                blocks_used=used,
                prefill_tokens_per_s=self._info["prefill_tokens_per_s"],
            )
            self._router.apply_load(worker, load, now)

    def _follow(
        self,
        keys: Sequence[BlockKey],
        request: Mapping[str, Any],
        matched: Sequence[int],
        now: float,
    ) -> None:
        """Cache events by which the index agrees with the judge about this prompt."""
        known = self._index.match(keys)
        for worker, tokens in zip(self._workers, matched, strict=True):
            # The judge never counts the last token as cached, the index counts whole blocks.
            whole = request["input_length"] if tokens == request["input_length"] - 1 else tokens
            here = known.get(worker)
            before, after = 0 if here is None else here.tokens // self._block, whole // self._block
            units = [int(key) for key in keys[self._stride - 1 :: self._stride]]
            if after > before:
                self._feed(worker, stored(units[before:after], None), now)
            elif after < before:
                self._feed(worker, removed(units[after:before]), now)

    def _feed(self, worker: WorkerId, event: CacheEvent, now: float) -> None:
        self._seqs[worker] += 1
        batch = EventBatch(
            worker, _EPOCH, "worker", self._seqs[worker], now, self._stride, (event,)
        )
        if not self._router.apply_events(batch, now).ok:
            raise ValueError("the judge's events do not fit")

    def _keys(self, blocks: Sequence[int]) -> list[BlockKey]:
        """One key per granule; blocks are already chained."""
        stride = self._stride
        return [BlockKey(block * stride + part) for block in blocks for part in range(stride)]
