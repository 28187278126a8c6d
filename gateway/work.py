"""One request under way: what is asked of the workers, and how far it has come. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from gateway.admission import Ticket
from gateway.config import GatewayConfig
from gateway.decision import Route
from gateway.exchange import KEPT_FROM_WORKERS, Answer, Client, Headers, Inbound, end_to_end
from gateway.prompts import Prompt
from gateway.router import Lease
from gateway.routing.base import Query
from gateway.spans import RequestTrace
from gateway.streaming import StreamTap
from shared import openai
from shared.blocks import GRANULE
from shared.deadline import timeout_s
from shared.errors import BadRequest
from shared.openai import GenerateRequest
from shared.types import WorkerId

_USUAL_OUTPUT = 128
MAX_NAME = 256
"""Longest session name that is looked at."""


class Cut(Enum):
    """Why a request is ended from here."""

    LATE = "late"
    SHUTDOWN = "shutdown"


class Work(msgspec.Struct, kw_only=True, eq=False):
    """Made by :func:`generation` or :func:`relayed`; moved on by the pipeline only."""

    inbound: Inbound
    query: Query
    request: GenerateRequest | None
    """None: passed on without a look inside."""
    path: str
    headers: Headers
    body: bytes
    policy: str | None
    timeout_s: float
    show: bool
    """Tell the client what was decided."""
    salt: str = ""
    """Goes into the body in place of the client's own where the engine understands it."""
    shared: str = ""
    """Tells a worker of ours where the salt begins (``shared.sharedprefix``); empty: at once."""
    tried: list[WorkerId] = []
    route: Route | None = None
    lease: Lease | None = None
    ticket: Ticket | None = None
    """It had to wait in the gateway."""
    tap: StreamTap | None = None
    task: asyncio.Task[object] | None = None
    client: Client | None = None
    asking: bool = False
    """A worker is being asked."""
    given_up: bool = False
    """The attempt under way is: its worker hangs."""
    why: Cut | None = None
    """The task has been cancelled for this."""
    trace: RequestTrace | None = None
    """It is traced: a span for it and for each attempt."""

    @property
    def expected_tokens(self) -> int:
        """What serving it will take, cached tokens included."""
        query = self.query
        prompt = query.prompt_tokens or len(query.keys) * GRANULE
        return prompt + (query.max_tokens or _USUAL_OUTPUT)

    def waits_for(self, worker: WorkerId) -> bool:
        """The worker has the request, and no byte of an answer has reached the client."""
        return (
            self.lease is not None
            and self.lease.worker == worker
            and self.client is not None
            and not self.client.started
        )

    def cut(self, why: Cut) -> None:
        """End it; its task learns of that where it waits. The first reason counts."""
        if self.why is None and self.task is not None:
            self.why = why
            self.task.cancel()

    def give_up(self) -> None:
        """End the attempt under way, not the request."""
        if not self.given_up and self.task is not None:
            self.given_up = True
            self.task.cancel()

    def attempt(self, route: Route, lease: Lease) -> None:
        """A further worker is tried."""
        self.route, self.lease, self.tap = route, lease, None
        self.tried.append(lease.worker)

    def marked(self, answer: Answer) -> Answer:
        """The answer with what was decided."""
        return Answer(answer.status, answer.body, self.mark(answer.headers))

    def mark(self, headers: Headers) -> Headers:
        """Headers with what was decided about the attempt that gave the answer."""
        if not self.show or self.route is None:
            return headers
        return [
            *headers,
            ("x-headwater-worker", self.route.worker),
            ("x-headwater-policy", self.route.policy),
            ("x-headwater-prompt-tokens", str(self.query.prompt_tokens)),
            ("x-headwater-matched-tokens", str(self.route.matched_tokens)),
            ("x-headwater-attempts", str(len(self.tried))),
        ]


def generation(
    inbound: Inbound, request: GenerateRequest, prompt: Prompt | None, config: GatewayConfig
) -> Work:
    """A chat or text completion. Usage is asked for even if the client did not, and the limit is
    given by both of its names."""
    prompt = prompt or Prompt()
    headers = inbound.headers
    session = headers.get("x-headwater-session") or request.session or ""
    ask = request.stream and not request.include_usage
    limited = openai.with_limit(request)
    return Work(
        inbound=inbound,
        query=Query(
            request_id=inbound.request_id,
            model=request.model or "",
            prompt_tokens=prompt.n_tokens,
            max_tokens=max(0, request.max_tokens or 0),
            arrived=inbound.arrived,
            # What nobody will reuse must not be expected, nor be missed when it is not delivered.
            keys=() if request.scores_prompt else prompt.keys,
            plain_keys=() if request.scores_prompt else prompt.plain_keys,
            adapter=prompt.adapter,
            session=session[:MAX_NAME],
            tenant=inbound.tenant,
            priority=_priority(headers),
            deadline=inbound.arrived + _timeout(headers, config),
        ),
        request=request,
        path=inbound.route,
        # The stream and the usage are read on the way, so they must not come packed.
        headers=_outgoing(inbound, config, "identity"),
        body=openai.with_usage(limited) if ask else limited,
        policy=_policy(headers, config),
        timeout_s=_timeout(headers, config),
        show=config.listen.headers,
        shared=prompt.shared,
    )


class _Named(msgspec.Struct):
    model: str | None = None


class _Salted(msgspec.Struct):
    cache_salt: str | None = None


def own_salt(body: bytes) -> str:
    """The client's own salt in a body that is not looked into further; empty without one."""
    try:
        return msgspec.json.decode(body, type=_Salted).cache_salt or ""
    except (msgspec.DecodeError, RecursionError):
        return ""


def relayed(inbound: Inbound, models: Sequence[str], config: GatewayConfig) -> Work:
    """Any other POST. Without a ``model`` in the body the only model there is is meant."""
    try:
        model = msgspec.json.decode(inbound.body, type=_Named).model
    except (msgspec.DecodeError, RecursionError):
        model = None
    if not model and len(models) == 1:
        model = models[0]
    if not model:
        raise BadRequest(
            "'model' is required: there is more than one model, or none.",
            param="model",
            code="model_not_found",
        )
    query = Query(
        request_id=inbound.request_id,
        model=model,
        prompt_tokens=0,
        max_tokens=0,
        arrived=inbound.arrived,
        tenant=inbound.tenant,
        priority=_priority(inbound.headers),
        deadline=inbound.arrived + _timeout(inbound.headers, config),
    )
    return Work(
        inbound=inbound,
        query=query,
        request=None,
        path=inbound.target,
        headers=_outgoing(inbound, config, inbound.headers.get("Accept-Encoding", "identity")),
        body=inbound.body,
        policy=None,
        timeout_s=_timeout(inbound.headers, config),
        show=config.listen.headers,
    )


def _outgoing(inbound: Inbound, config: GatewayConfig, encoding: str) -> Headers:
    headers = end_to_end(inbound.headers.items(), KEPT_FROM_WORKERS)
    headers += [("Accept-Encoding", encoding), ("x-request-id", inbound.request_id)]
    if config.workers.api_key:
        headers.append(("Authorization", f"Bearer {config.workers.api_key}"))
    return headers


def _policy(headers: Mapping[str, str], config: GatewayConfig) -> str | None:
    wanted = headers.get("x-headwater-policy")
    return wanted if wanted and config.routing.allow_policy_header else None


def _priority(headers: Mapping[str, str]) -> int:
    text = headers.get("x-headwater-priority")
    if text is None:
        return 0
    try:
        return int(text)
    except ValueError:
        raise BadRequest(
            "'x-headwater-priority' must be an integer.", param="x-headwater-priority"
        ) from None


def _timeout(headers: Mapping[str, str], config: GatewayConfig) -> float:
    longest = config.workers.request_timeout_s
    wanted = timeout_s(headers)
    return longest if wanted is None else min(wanted, longest)
