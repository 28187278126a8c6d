"""What a pipeline is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.decision import Route
from gateway.exchange import Inbound
from gateway.gate import Gate
from gateway.givers import Givers
from gateway.prompts import Prompts
from gateway.records import RequestRecord
from gateway.retries import RetryBudget
from gateway.router import Router
from gateway.sharedlimits import Limiter
from gateway.spans import Tracing
from gateway.telemetry import PrometheusSink, RecordSink
from gateway.tenancy import Tenants
from gateway.upstream import Upstream
from shared.types import WorkerId


@dataclass(slots=True, kw_only=True)
class Parts:
    """See the module's text."""

    router: Router
    prompts: Prompts
    upstream: Upstream
    metrics: PrometheusSink
    sinks: Sequence[RecordSink]
    """Each gets every record; ``metrics`` is one of them."""
    config: GatewayConfig
    tenants: Tenants
    limiter: Limiter
    givers: Givers
    traces: Sequence[Callable[[Route | None, RequestRecord], None]] = ()
    """Told about each attempt with the decision behind it; None: the request was rejected."""
    suspect: Callable[[WorkerId], None] = lambda worker: None
    """Told about a worker that failed."""
    recalling: Collection[WorkerId] = ()
    """Workers of which it is not known all that they hold (``Engine.edits``)."""
    sample: Callable[[Inbound], None] | None = None
    """Told about each completion that was asked for; may keep its text."""
    spans: Tracing | None = None
    clock: Callable[[], float] = time.monotonic
    budget: RetryBudget = field(default_factory=RetryBudget)
    gate: Gate | None = None
    """None: one is made, for the pipeline alone."""
