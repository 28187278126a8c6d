"""Small builders for router tests: a fleet, prompts as key lists, and attempts that end well."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from gateway.config import RoutingConfig
from gateway.decision import AttemptEnd, Reject, Route
from gateway.index.table import PrefixTable
from gateway.lease import Lease
from gateway.records import Outcome, RequestRecord, TokenFlow
from gateway.router import Router
from gateway.routing.base import Query, Trust
from gateway.routing.catalogue import make_policies
from gateway.trust import TrustChange
from shared.events import CacheEvent, EventBatch, Snapshot, removed, stored
from shared.load import WorkerInfo
from shared.openai import Usage
from shared.types import BlockKey, Epoch, RequestId, WorkerId


class Rig:
    """A router over ``workers`` workers with blocks of 16 tokens and an event feed."""

    def __init__(
        self,
        workers: int = 4,
        *,
        seed: int = 1,
        events: bool = True,
        on_trust: Callable[[TrustChange], None] = lambda change: None,
        **config: Any,
    ) -> None:
        self.rng = Random(seed)
        self.config = RoutingConfig(**config)
        self.index = PrefixTable(self.config.index_max_blocks, Random(seed))
        policies = make_policies(self.config)
        self.router = Router(self.index, policies, self.config, Random(seed), on_trust=on_trust)
        self.now = 100.0
        self.count = 0
        self.seqs: dict[str, int] = {}
        self.names = [f"w{n}" for n in range(1, workers + 1)]
        for name in self.names:
            self.join(name, event_feed=events)
            if events:
                self.feed(name, Snapshot(b""))
                self.router.set_trust(WorkerId(name), Trust.EXACT, "events flow", self.now)

    def join(self, name: str, *, epoch: int = 1, **fields: Any) -> None:
        info: dict[str, Any] = {
            "id": WorkerId(name),
            "epoch": Epoch(epoch),
            "url": f"http://{name}",
            "models": ("m", "alias"),
            "tokenizer": "tok",
        }
        self.router.join(WorkerInfo(**(info | fields)), self.now)
        if epoch != 1:
            self.seqs.pop(name, None)

    def feed(self, name: str, *events: CacheEvent, epoch: int = 1, stride: int = 1) -> str:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        batch = EventBatch(
            WorkerId(name), Epoch(epoch), "worker", self.seqs[name], 0.0, stride, events
        )
        return self.router.apply_events(batch, self.now).reason

    def warm(self, name: str, keys: list[BlockKey]) -> None:
        assert self.feed(name, stored([int(key) for key in keys], None)) == "applied"

    def evict(self, name: str, keys: list[BlockKey]) -> None:
        assert self.feed(name, removed([int(key) for key in keys])) == "applied"

    def prompt(self, granules: int) -> list[BlockKey]:
        return [BlockKey(self.rng.getrandbits(64)) for _ in range(granules)]

    def query(self, keys: list[BlockKey], *, tokens: int | None = None, **fields: Any) -> Query:
        self.count += 1
        values: dict[str, Any] = {
            "request_id": RequestId(f"req-{self.count}"),
            "model": "m",
            "prompt_tokens": len(keys) * 16 + 1 if tokens is None else tokens,
            "max_tokens": 16,
            "arrived": self.now,
            "keys": keys,
        }
        return Query(**(values | fields))

    def route(self, keys: list[BlockKey], **options: Any) -> Route:
        decision = self.router.decide(self.query(keys), self.now, **options)
        assert isinstance(decision, Route)
        return decision

    def reject(self, query: Query, **options: Any) -> Reject:
        decision = self.router.decide(query, self.now, **options)
        assert isinstance(decision, Reject)
        return decision

    def begin(self, keys: list[BlockKey], **options: Any) -> Lease:
        return self.router.begin(self.route(keys, **options), self.now, attempt=1)

    def serve(self, keys: list[BlockKey], cached: int | None = 0, **options: Any) -> RequestRecord:
        """One whole request that takes no time."""
        lease = self.begin(keys, **options)
        lease.first_token(self.now)
        return lease.finish(ok(len(keys) * 16 + 1, cached), self.now)

    def inflight(self) -> dict[str, int]:
        return {status.id: status.inflight for status in self.router.workers(self.now)}


def flow_of(record: RequestRecord) -> dict[str, int]:
    """The non-zero terms."""
    record.flow.check()
    names = TokenFlow.__struct_fields__
    return {name: getattr(record.flow, name) for name in names if getattr(record.flow, name)}


def ok(prompt: int = 17, cached: int | None = 0, **fields: Any) -> AttemptEnd:
    return AttemptEnd(
        outcome=Outcome.OK, status=200, usage=Usage(prompt, 4, cached), wall_at=1.0, **fields
    )


def failed(
    status: int = 500, outcome: Outcome = Outcome.UPSTREAM_ERROR, **fields: Any
) -> AttemptEnd:
    return AttemptEnd(outcome=outcome, status=status, wall_at=1.0, **fields)
