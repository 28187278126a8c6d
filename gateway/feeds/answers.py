"""What comes back from asking a worker: plain values, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.engines.base import Reading
from shared.load import AdapterInfo, Names, WorkerLoad

REASON_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from one GET."""

    status: int = 0
    """0: nothing came back."""
    body: bytes = b""
    reason: str = ""
    """Why nothing came back."""
    refused: bool = False
    """Nobody listens there, or the connection was cut."""

    @property
    def ok(self) -> bool:
        """A 2xx."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Probe:
    """One worker at one moment."""

    healthy: bool
    reason: str = ""
    """Why not; empty if healthy."""
    refused: bool = False
    """Nobody listens there, or the connection was cut: the process is gone."""
    alive: bool = False
    """It answered something, if only that it is not ready."""
    load: WorkerLoad | None = None
    names: Names | None = None
    """Of a foreign server: models and adapters that it answers to now."""
    reading: Reading | None = None
    """Of an engine of another make: its load as its adapter read it."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: Any = None
    """Of an adapter: the name of its model."""
    root: Any = None
    """Where its weights come from, if it says so: the same for all names of one model."""

    @property
    def adapter(self) -> bool:
        """Whether it is one."""
        return isinstance(self.parent, str) and bool(self.parent)


class ModelList(msgspec.Struct):
    """``GET /v1/models``."""

    data: list[_Card]

    @property
    def many_models(self) -> bool:
        """Whether several models are listed, not several names of one."""
        roots = {str(card.root or card.id) for card in self.data if not card.adapter}
        return len(roots) > 1

    @property
    def names(self) -> Names:
        """Models, and their adapters apart; if nothing but adapters is listed, they are models."""
        models = tuple(card.id for card in self.data if not card.adapter)
        if not models:
            return tuple(card.id for card in self.data), ()
        return models, tuple(AdapterInfo(card.id) for card in self.data if card.adapter)


class _NotReady(msgspec.Struct):
    reasons: list[str] = []


def readiness(ready: Answer, load: WorkerLoad | None) -> Probe:
    """Of a worker of ours, from ``/ready``."""
    if ready.ok:
        return Probe(True, alive=True, load=load)
    if ready.status != 503:
        return replace(failed("/ready", ready), load=load)
    try:
        reasons = msgspec.json.decode(ready.body, type=_NotReady).reasons
    except (msgspec.DecodeError, RecursionError):
        reasons = []
    return Probe(False, short("; ".join(reasons) or "not ready"), alive=True, load=load)


def load_of(answer: Answer) -> WorkerLoad | None:
    """Of a worker of ours; None: it cannot be read."""
    if not answer.ok:
        return None
    try:
        return msgspec.json.decode(answer.body, type=WorkerLoad)
    except (msgspec.DecodeError, RecursionError):
        return None


def models_of(answer: Answer) -> ModelList | Probe:
    """A list of models, or why it is none."""
    if not answer.ok:
        return failed("/v1/models", answer)
    try:
        return msgspec.json.decode(answer.body, type=ModelList)
    except (msgspec.DecodeError, RecursionError) as error:
        return Probe(False, short(f"/v1/models cannot be read: {error}"))


def failed(path: str, answer: Answer) -> Probe:
    """What an answer that is no success says."""
    reason = answer.reason or f"{path} answered {answer.status}"
    return Probe(False, reason, answer.refused, alive=answer.status != 0)


def short(text: Any) -> str:
    """Text of a peer, cut to a fit length."""
    return str(text)[:REASON_LIMIT]
