"""One request under way: what is asked of the workers, and how far it has come. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

import msgspec
from msgspec.structs import replace

from gateway.admission import Ticket
from gateway.config import GatewayConfig
from gateway.decision import Reject, Route
from gateway.engines.base import Salting
from gateway.engines.catalogue import engine
from gateway.exchange import KEPT_FROM_WORKERS, Answer, Client, Headers, Inbound, end_to_end
from gateway.prompts import Prompt
from gateway.router import Lease
from gateway.routing.base import Query, key_tokens
from gateway.spans import RequestTrace
from gateway.streaming import StreamTap
from gateway.wire.heads import plus, sealed
from shared import openai
from shared.deadline import timeout_s
from shared.dialogue import Dialogue
from shared.errors import BadRequest, NoCapacity
from shared.headernum import whole
from shared.jsonsplice import Edit, apply, insert_first, set_member
from shared.openai import GenerateRequest
from shared.types import WorkerId

_USUAL_OUTPUT = 128
_MEMO = "terms"
_RETRY_AFTER_S = 1.0
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
    method: str = "POST"
    elsewhere: Sequence[WorkerId] = ()
    """Workers that cannot serve it: another one holds what it goes on from."""
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
    streamed: bool = False
    """An event stream of another form than chat's is asked for."""
    relayed: bool = False
    """Its answer is an event stream of another form than chat's."""
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
        prompt = query.prompt_tokens or key_tokens(query)
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
        self.route, self.lease, self.tap, self.relayed = route, lease, None, False
        self.tried.append(lease.worker)

    def marked(self, answer: Answer) -> Answer:
        """The answer with what was decided."""
        return Answer(answer.status, answer.body, self.mark(answer.headers))

    def mark(self, headers: Headers) -> Headers:
        """Headers with what was decided about the attempt that gave the answer."""
        if not self.show or self.route is None:
            return headers
        return plus(
            headers,
            ("x-headwater-worker", self.route.worker),
            ("x-headwater-policy", self.route.policy),
            ("x-headwater-prompt-tokens", str(self.query.prompt_tokens)),
            ("x-headwater-matched-tokens", str(self.route.matched_tokens)),
            ("x-headwater-attempts", str(len(self.tried))),
        )


def generation(
    inbound: Inbound, request: GenerateRequest, prompt: Prompt | None, config: GatewayConfig
) -> Work:
    """A chat or text completion. Usage is asked for even if the client did not, and the limit is
    given by both of its names."""
    prompt = prompt or Prompt()
    # The stream and the usage are read on the way, so they must not come packed.
    terms = _terms(inbound, config, "identity")
    ask = request.stream and not request.include_usage
    limited = openai.with_limit(request)
    scores, limit = request.scores_prompt, request.max_tokens or 0
    query = Query(
        request_id=inbound.request_id,
        model=request.model or "",
        prompt_tokens=prompt.n_tokens,
        max_tokens=limit if limit > 0 else 0,
        arrived=inbound.arrived,
        # What nobody will reuse must not be expected, nor be missed when it is not delivered.
        keys=() if scores else prompt.keys,
        plain_keys=() if scores else prompt.plain_keys,
        adapter=prompt.adapter,
        session=terms.session or (request.session or "")[:MAX_NAME],
        tenant=inbound.tenant,
        priority=terms.priority,
        deadline=inbound.arrived + terms.timeout_s,
    )
    return Work(
        inbound=inbound,
        query=_of_each(query, prompt, scores=scores) if prompt.prompts else query,
        request=request,
        path=inbound.route,
        headers=plus(terms.headers, ("x-request-id", inbound.request_id)),
        body=openai.asking_usage(request, limited) if ask else limited,
        policy=terms.policy,
        timeout_s=terms.timeout_s,
        show=config.listen.headers,
        shared=prompt.shared,
    )


def _of_each(query: Query, prompt: Prompt, *, scores: bool) -> Query:
    """The query of a list of prompts, with one for each of them that is not empty."""
    each = [
        replace(
            query,
            prompt_tokens=one.n_tokens,
            keys=() if scores else one.keys,
            plain_keys=() if scores else one.plain_keys,
        )
        for one in prompt.prompts
        if one.n_tokens or one.keys
    ]
    return replace(query, prompts=tuple(each))


def dialogue(
    inbound: Inbound, model: str, asked: Dialogue, prompt: Prompt, config: GatewayConfig
) -> Work:
    """A response or a message: passed on as it is, but known by the text of its prompt."""
    # The usage is read on the way, so answers must not come packed.
    item = relayed(inbound, model, config, "identity")
    terms = _terms(inbound, config, "identity")
    item.query = replace(
        item.query,
        max_tokens=asked.max_tokens,
        keys=prompt.keys,
        plain_keys=prompt.plain_keys,
        adapter=prompt.adapter,
        session=terms.session or asked.session,
    )
    item.policy, item.streamed = terms.policy, asked.stream
    return item


def relayed(
    inbound: Inbound, model: str, config: GatewayConfig, encoding: str | None = None
) -> Work:
    """Any other POST. ``encoding``: what of packed answers the worker may send; None: what the
    client takes."""
    if encoding is None:
        encoding = inbound.headers.get("Accept-Encoding", "identity")
    terms = _terms(inbound, config, encoding)
    query = Query(
        request_id=inbound.request_id,
        model=model,
        prompt_tokens=0,
        max_tokens=0,
        arrived=inbound.arrived,
        tenant=inbound.tenant,
        priority=terms.priority,
        deadline=inbound.arrived + terms.timeout_s,
    )
    return Work(
        inbound=inbound,
        query=query,
        request=None,
        path=inbound.target,
        headers=plus(terms.headers, ("x-request-id", inbound.request_id)),
        body=inbound.body,
        policy=None,
        timeout_s=terms.timeout_s,
        show=config.listen.headers,
    )


def settled(item: Work, decision: Route | Reject) -> Route | Reject:
    """The decision; where one worker alone can serve it, a refusal says that this one is missing.

    Whoever reads that others were tried looks for the fault there.
    """
    if isinstance(decision, Route) or not item.elsewhere or item.tried:
        return decision
    message = "The worker that gave the response to go on from is not ready."
    return Reject(NoCapacity(message, retry_after_s=_RETRY_AFTER_S), "no_worker")


class _Terms(msgspec.Struct, frozen=True):
    """What a request's headers ask for, and which go on: the same for all with an equal head."""

    config: GatewayConfig
    session: str
    priority: int
    timeout_s: float
    policy: str | None
    headers: Headers


def _terms(inbound: Inbound, config: GatewayConfig, encoding: str) -> _Terms:
    """Raises ``BadRequest``. ``encoding``: what of packed answers the worker may send."""
    terms: _Terms | None = inbound.memo.get(_MEMO)
    # One head is used on one route only; the configuration may have been changed meanwhile.
    if terms is None or terms.config is not config:
        headers = inbound.headers
        forwarded = end_to_end(headers.items(), KEPT_FROM_WORKERS)
        forwarded.append(("Accept-Encoding", encoding))
        if config.workers.api_key:
            forwarded.append(("Authorization", f"Bearer {config.workers.api_key}"))
        terms = _Terms(
            config=config,
            session=headers.get("x-headwater-session", "")[:MAX_NAME],
            priority=_priority(headers),
            timeout_s=_timeout(headers, config),
            policy=_policy(headers, config),
            headers=sealed(forwarded),
        )
        inbound.memo[_MEMO] = terms
    return terms


def _policy(headers: Mapping[str, str], config: GatewayConfig) -> str | None:
    wanted = headers.get("x-headwater-policy")
    return wanted if wanted and config.routing.allow_policy_header else None


def _priority(headers: Mapping[str, str]) -> int:
    text = headers.get("x-headwater-priority")
    if text is None:
        return 0
    value = whole(text, -(2**31), 2**31 - 1)
    if value is None:
        raise BadRequest(
            "'x-headwater-priority' must be an integer of 32 bits.", param="x-headwater-priority"
        )
    return value


def _timeout(headers: Mapping[str, str], config: GatewayConfig) -> float:
    longest = config.workers.request_timeout_s
    wanted = timeout_s(headers)
    return longest if wanted is None else min(wanted, longest)


def body_for(work: Work, recalling: Collection[WorkerId]) -> bytes:
    """The body with what the engine of the worker that is asked needs besides.

    :param recalling: see ``Parts.recalling``.
    """
    lease = work.lease
    if lease is None:
        return work.body
    adapter = engine(lease.engine)
    edits: list[Edit] = []
    if work.request is not None and lease.worker in recalling:
        edits += adapter.edits(work.body, recall=True)
    if work.salt and adapter.salting is not Salting.NONE:
        edits += _salted(work)
    return apply(work.body, edits) if edits else work.body


def _salted(work: Work) -> list[Edit]:
    """The edits that give the body its tenant's salt instead of its own."""
    salt = msgspec.json.encode(work.salt)
    if work.request is not None and "cache_salt" not in work.request.fields:
        return [insert_first(work.body, "cache_salt", salt)]  # not there: need not be looked for
    return set_member(work.body, "cache_salt", salt)
