"""The index against a model: a set of keys per worker."""

from __future__ import annotations

from random import Random

from depth import DEPTH
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.index.backends import use_arrays
from gateway.index.compact import CompactHoldings
from gateway.index.table import PrefixTable
from shared.blocks import GRANULE, pack_keys
from shared.events import CacheCleared, CacheEvent, EventBatch, Snapshot, removed, stored
from shared.types import BlockKey, Epoch, Tier, WorkerId

STRIDES = {"a": 1, "b": 1, "c": 2, "d": 2}
WORKERS = st.sampled_from(sorted(STRIDES))
KEYS = st.lists(st.integers(1, 12), max_size=8)


class Model:
    """What a worker must look like."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.held: set[int] = set()
        self.host: set[int] = set()
        self.seq = 0
        self.known = False
        self.broken = False


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = PrefixTable(10**6, Random(0))
        self.models: dict[str, Model] = {}

    def send(self, worker: str, seq: int, *events: CacheEvent, epoch: int | None = None) -> str:
        model = self.models.get(worker)
        if epoch is None:
            epoch = 1 if model is None else model.epoch
        stride = STRIDES[worker]
        batch = EventBatch(WorkerId(worker), Epoch(epoch), "worker", seq, 0.0, stride, events)
        return self.table.apply(batch).reason

    @rule(worker=WORKERS, newer=st.booleans())
    def join(self, worker: str, newer: bool) -> None:
        model = self.models.get(worker)
        epoch = 1 if model is None else model.epoch + newer
        self.table.join(WorkerId(worker), Epoch(epoch), STRIDES[worker])
        if model is None or newer:
            self.models[worker] = Model(epoch)

    @rule(worker=WORKERS)
    def forget(self, worker: str) -> None:
        self.table.forget(WorkerId(worker))
        self.models.pop(worker, None)

    @rule(worker=WORKERS, new=KEYS, gone=KEYS, clear=st.booleans())
    def next_batch(self, worker: str, new: list[int], gone: list[int], clear: bool) -> None:
        model = self.models.get(worker)
        events: list[CacheEvent] = [stored(new, None), removed(gone)]
        if clear:
            events.insert(0, CacheCleared())
        reason = self.send(worker, 1 if model is None else model.seq + 1, *events)
        if model is None:
            assert reason == "unknown_worker"
        elif model.broken:
            assert reason == "gap"
        else:
            assert reason == "applied"
            model.held = ((set() if clear else model.held) | set(new)) - set(gone)
            model.host = set() if clear else model.host
            model.seq += 1
            model.known = True

    @rule(worker=WORKERS, down=KEYS, up=KEYS, dropped=KEYS)
    def move(self, worker: str, down: list[int], up: list[int], dropped: list[int]) -> None:
        """Some keys go to host memory, then some come back and some are dropped there."""
        model = self.models.get(worker)
        if model is None or model.broken:
            return
        host = Tier.HOST
        events = (removed(down), stored(down, None, host), stored(up, None), removed(up, host))
        assert self.send(worker, model.seq + 1, *events, removed(dropped, host)) == "applied"
        model.held = model.held - set(down) | set(up)
        model.host = (model.host | set(down)) - set(up) - set(dropped)
        model.seq += 1
        model.known = True

    @rule(worker=WORKERS, new=KEYS)
    def repeated_batch(self, worker: str, new: list[int]) -> None:
        model = self.models.get(worker)
        if model is not None and model.seq:
            expected = "gap" if model.broken else "duplicate"
            assert self.send(worker, model.seq, stored(new, None)) == expected

    @rule(worker=WORKERS, new=KEYS, skipped=st.integers(1, 3))
    def lost_batch(self, worker: str, new: list[int], skipped: int) -> None:
        model = self.models.get(worker)
        if model is not None:
            assert self.send(worker, model.seq + 1 + skipped, stored(new, None)) == "gap"
            model.broken = model.known

    @rule(worker=WORKERS, keys=KEYS, host=st.none() | KEYS, ahead=st.integers(0, 5))
    def snapshot(self, worker: str, keys: list[int], host: list[int] | None, ahead: int) -> None:
        model = self.models.get(worker)
        if model is not None:
            seq = model.seq + ahead
            tiers = [Snapshot(pack_keys(keys))]
            if host is not None:
                tiers.append(Snapshot(pack_keys(host), Tier.HOST))
            assert self.send(worker, seq, *tiers) == "applied"
            model.held, model.seq, model.known, model.broken = set(keys), seq, True, False
            model.host = set(host or ())

    @rule(worker=WORKERS, new=KEYS)
    def new_incarnation_by_batch(self, worker: str, new: list[int]) -> None:
        model = self.models.get(worker)
        if model is not None:
            epoch = model.epoch + 1
            assert self.send(worker, 1, stored(new, None), epoch=epoch) == "applied"
            fresh = self.models[worker] = Model(epoch)
            fresh.held, fresh.seq, fresh.known = set(new), 1, True
            assert self.send(worker, 2, stored([5], None), epoch=epoch - 1) == "old_epoch"

    @rule(budget=st.integers(0, 20))
    def tidy(self, budget: int) -> None:
        self.table.tidy(budget)

    @rule(prompt=st.lists(st.integers(1, 12), max_size=10, unique=True))
    def match(self, prompt: list[int]) -> None:
        expected: dict[str, tuple[int, int]] = {}
        for worker, model in self.models.items():
            stride = STRIDES[worker]
            depth = device = 0
            for key in prompt[stride - 1 :: stride]:
                if key not in model.held | model.host:
                    break
                if device == depth and key in model.held:
                    device += stride
                depth += stride
            if depth:
                expected[worker] = (depth * GRANULE, (depth - device) * GRANULE)
        found = self.table.match([BlockKey(key) for key in prompt])
        assert {w: (match.tokens, match.host_tokens) for w, match in found.items()} == expected

    @invariant()
    def books_balance(self) -> None:
        self.table.check()
        for worker in STRIDES:
            model = self.models.get(worker)
            held = set() if model is None else model.held
            assert self.table.blocks(WorkerId(worker)) == len(held)
            host = set() if model is None else model.host
            assert self.table.blocks(WorkerId(worker), Tier.HOST) == len(host)
            position = self.table.position(WorkerId(worker))
            known = model is not None and model.known
            assert position == ((model.epoch, model.seq) if known and model else None)


IndexMachine.TestCase.settings = settings(
    max_examples=60 * DEPTH, stateful_step_count=40, deadline=None
)
TestIndex = IndexMachine.TestCase


class ArraysMachine(IndexMachine):
    """The same of the storage for large tables, so small that it is rebuilt all the time."""

    def __init__(self) -> None:
        super().__init__()
        use_arrays(self.table)
        self.table.compact_from = 1

    @rule()
    def rebuild(self) -> None:
        """At any moment; it goes on with later changes."""
        for holdings in self.table._strides.values():
            if isinstance(holdings, CompactHoldings) and holdings._old is None:
                holdings._start_rebuild(0)

    @rule()
    def go_on(self) -> None:
        for holdings in self.table._strides.values():
            if isinstance(holdings, CompactHoldings) and holdings._old is not None:
                holdings._move(40)


ArraysMachine.TestCase.settings = settings(
    max_examples=60 * DEPTH, stateful_step_count=40, deadline=None
)
TestArrays = ArraysMachine.TestCase
