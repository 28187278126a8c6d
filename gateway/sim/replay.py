"""The event loop: a trace against one policy, with the live router between clients and workers.

A heap of moments takes the place of a clock. The router is told what a gateway in ``exact`` trust
is told: cache events as they happen, each worker's load once a second, first tokens and ends.
Network and router take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from math import floor
from random import Random

from gateway.config import RoutingConfig
from gateway.decision import AttemptEnd, Reject
from gateway.index.table import PrefixTable
from gateway.lease import Lease
from gateway.records import Outcome
from gateway.router import Router
from gateway.routing.base import Policy, Query, Trust
from gateway.routing.cost import CostModel
from gateway.sim.model import WorkerModel
from gateway.sim.trace import Trace
from gateway.sim.worker import EPOCH, Job, SimWorker, granule_keys
from shared.events import EventBatch
from shared.load import WorkerInfo
from shared.openai import Usage
from shared.types import RequestId, WorkerId

Factory = Callable[[RoutingConfig, CostModel], Policy]
"""Makes a fresh policy, as in :mod:`gateway.routing.catalogue`."""

HEARTBEAT_S = 1.0
_MODEL = "m"


class _Kind(IntEnum):
    """What happens at a moment; of those at one time arrivals come first."""

    ARRIVES = 0
    FIRST_TOKEN = 1
    ENDS = 2


@dataclass(frozen=True, slots=True)
class Served:
    """What a run left behind, one entry per request or worker."""

    ttft_s: list[float]
    cached_tokens: list[int]
    worker: list[int]
    busy_s: list[float]
    """Prefill, by worker."""
    end_s: float
    """From the first arrival until the last answer was complete."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request on its way."""

    job: Job
    at: int
    lease: Lease
    arrived: float
    first_token: float = 0.0


class Replay:
    """One run; :meth:`run` may be called once.

    :param scale: factor on the trace's arrival times; think times stay as they are.
    :param seed: of the router's and the index's RNGs.
    """

    def __init__(
        self,
        trace: Trace,
        model: WorkerModel,
        workers: int,
        factory: Factory,
        scale: float,
        seed: int,
    ) -> None:
        self._trace = trace
        self._scale = scale
        self._workers = [
            SimWorker(WorkerId(f"w{at:05}"), model, trace.block_size) for at in range(workers)
        ]
        self._at = {worker.id: at for at, worker in enumerate(self._workers)}
        self._router = _make_router(model, factory, seed)
        self._moments: list[tuple[float, bool, int, _Kind, int]] = []
        self._order = count()
        self._open: dict[int, _Open] = {}
        self._beats = -1
        n = len(trace.requests)
        self._ttft_s = [0.0] * n
        self._cached = [0] * n
        self._where = [0] * n
        for worker in self._workers:
            self._join(worker, model.kv_blocks)

    def run(self, on_progress: Callable[[int], None] = lambda done: None) -> Served:
        """Serve all requests; ``on_progress`` is told how many have been answered."""
        for number, request in enumerate(self._trace.requests):
            if request.first:
                self._expect(request.arrival_s * self._scale, _Kind.ARRIVES, number)
        begun, done = self._moments[0][0], 0
        now = begun
        while self._moments:
            now, _, _, kind, number = heapq.heappop(self._moments)
            self._heartbeat(now)
            if kind is _Kind.ARRIVES:
                worker = self._arrive(number, now)
            elif kind is _Kind.FIRST_TOKEN:
                worker = self._first_token(number, now)
            else:
                worker = self._end(number, now)
                done += 1
                on_progress(done)
            self._go_on(worker, now)
        busy = [worker.busy_s for worker in self._workers]
        return Served(self._ttft_s, self._cached, self._where, busy, now - begun)

    def check(self) -> None:
        """After a run nothing is left, and the router knows what is cached; AssertionError if not.

        O(everything): for tests.
        """
        now = self._beats * HEARTBEAT_S
        assert not self._open
        assert not self._router.bookings(now)
        for worker, status in zip(self._workers, self._router.workers(now), strict=True):
            worker.check()
            assert worker.idle
            assert status.index_blocks == worker.announced

    def _expect(self, at: float, kind: _Kind, number: int) -> None:
        later = kind is not _Kind.ARRIVES
        # Arrivals of one moment go by their place in the trace, all else by when it was foreseen.
        order = next(self._order) if later else number
        heapq.heappush(self._moments, (at, later, order, kind, number))

    def _arrive(self, number: int, now: float) -> SimWorker:
        request = self._trace.requests[number]
        query = Query(
            request_id=RequestId(str(number)),
            model=_MODEL,
            prompt_tokens=request.input_tokens,
            max_tokens=request.output_tokens,
            arrived=now,
            keys=granule_keys(request.path, self._trace.block_size),
            session=request.session,
        )
        route = self._router.decide(query, now)
        if isinstance(route, Reject):
            raise RuntimeError(f"all workers are ready, yet {route.reason}")
        at = self._at[route.worker]
        job = Job(number, request)
        self._open[number] = _Open(job, at, self._router.begin(route, now, attempt=1), now)
        self._where[number] = at
        self._workers[at].put(job)
        return self._workers[at]

    def _first_token(self, number: int, now: float) -> SimWorker:
        request = self._open[number]
        worker = self._workers[request.at]
        self._ttft_s[number] = now - request.arrived
        self._cached[number] = request.job.cached_tokens
        request.first_token = now
        self._expect(now + worker.end_prefill(request.job), _Kind.ENDS, number)
        request.lease.first_token(now)
        return worker

    def _end(self, number: int, now: float) -> SimWorker:
        request = self._open.pop(number)
        worker, asked = self._workers[request.at], request.job.request
        worker.finish(request.job)
        end = AttemptEnd(
            outcome=Outcome.OK,
            status=200,
            usage=Usage(asked.input_tokens, asked.output_tokens, request.job.cached_tokens),
            itl_s=(now - request.first_token) / asked.output_tokens,
            wall_at=now,
        )
        request.lease.finish(end, now)
        if asked.following is not None:
            think_s = self._trace.requests[asked.following].think_s
            self._expect(now + think_s, _Kind.ARRIVES, asked.following)
        return worker

    def _go_on(self, worker: SimWorker, now: float) -> None:
        """Let a worker to which something has happened start its next prefill, and tell."""
        begun = worker.begin_prefill(now)
        if begun is not None:
            job, took = begun
            self._expect(now + took, _Kind.FIRST_TOKEN, job.number)
        batch = worker.drain(now)
        if batch is not None:
            self._tell(batch, now)

    def _heartbeat(self, now: float) -> None:
        """Loads as of the last full second: nothing has changed since the moment before."""
        beats = floor(now / HEARTBEAT_S)
        if beats > self._beats:
            self._beats = beats
            for worker in self._workers:
                load = worker.load(beats * HEARTBEAT_S)
                self._router.apply_load(worker.id, load, beats * HEARTBEAT_S)

    def _join(self, worker: SimWorker, blocks: int) -> None:
        info = WorkerInfo(
            id=worker.id,
            epoch=EPOCH,
            url=f"http://{worker.id}",
            models=(_MODEL,),
            block_size=self._trace.block_size,
            blocks_total=blocks,
        )
        self._router.join(info, 0.0)
        self._tell(worker.snapshot(), 0.0)
        self._router.set_trust(worker.id, Trust.EXACT, "events flow", 0.0)

    def _tell(self, batch: EventBatch, now: float) -> None:
        if not self._router.apply_events(batch, now).ok:
            raise RuntimeError("a worker's events do not follow each other")


def _make_router(model: WorkerModel, factory: Factory, seed: int) -> Router:
    """A gateway's router with its defaults; of the model it knows the shape, not the figures."""
    config, cost = RoutingConfig(), CostModel(quadratic=model.quadratic)
    index = PrefixTable(config.index_max_blocks, Random(seed))
    policies = {config.policy: factory(config, cost)}
    return Router(index, policies, config, Random(seed), cost=cost)
