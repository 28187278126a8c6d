"""Read me first: the story of a request.

    parse -> render, encode, hash -> admit -> decide -> begin -> attempt -> deliver -> finish

(The web server around it, ``app.py``, has authenticated the caller and read the body.)

- While no worker has room, a request waits (``gateway/gate.py``), and is decided anew when it goes.
- Work is booked when a worker is chosen (``Router.begin``) and released exactly once per attempt
  (:mod:`gateway.endings`), on every way out: answered, refused, broken, late, left, shut down.
- While no byte of an answer has been sent, a failed attempt is followed by another on a worker that
  was not tried yet, at most ``routing.retries`` times and within the retry budget. 4xx answers are
  the client's own and never retried, unless the worker has just lost the model (``model_gone``).
  After the first byte a failure becomes an error event.
- The body goes out as it came, but for splices: one asks for usage, others an engine may need.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from gateway import attempt, refusals, relayedbodies, relayedstream, work
from gateway.admission import soon, with_room
from gateway.config import GatewayConfig
from gateway.deadlines import Deadlines
from gateway.decision import Reject, Route
from gateway.endings import Endings
from gateway.engines.base import Salting
from gateway.engines.catalogue import engine
from gateway.exchange import Client, ClientGone, Inbound, error_answer
from gateway.gate import Gate, Shed
from gateway.parts import Parts
from gateway.prompts import Prompt
from gateway.records import Outcome
from gateway.refusals import AttemptFailed
from gateway.streaming import error_event
from gateway.tenancy import Tenants
from gateway.upstream import Timeouts, UpstreamError, UpstreamTimeout
from gateway.wire.heads import plus
from gateway.work import Cut, Work
from shared import dialogue, openai, sharedprefix
from shared.aside import aside
from shared.bulk import LARGE_BODY
from shared.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    NoCapacity,
    NotFound,
    RateLimited,
)
from shared.openai import RouteKind
from shared.types import WorkerId

CLIENT_CLOSED = 499
"""Status in records for a client that left before it had its answer."""


class Pipeline:
    """Serves requests one by one; holds no state but the running ones."""

    def __init__(self, parts: Parts) -> None:
        self._router, self._prompts, self._upstream = parts.router, parts.prompts, parts.upstream
        self._metrics, self._config = parts.metrics, parts.config
        self._parsed, self._tokenized, self._hashed, self._looked_up, self._ranked = (
            parts.metrics.stage(name) for name in ("parse", "tokenize", "hash", "lookup", "rank")
        )
        self._clock, self._budget, self._suspect = parts.clock, parts.budget, parts.suspect
        self._recalling = parts.recalling
        self._spans, self._sample = parts.spans, parts.sample
        workers = parts.config.workers
        self._timeouts = Timeouts(workers.connect_timeout_s, workers.idle_timeout_s)
        self._tenants, self._limiter, self._givers = parts.tenants, parts.limiter, parts.givers
        self._gate = parts.gate or Gate(parts.config.admission, parts.clock)
        self._endings = Endings(parts, self._gate)
        self._running: set[Work] = set()
        self._deadlines = Deadlines[Work](lambda item: item.cut(Cut.LATE))

    def reconfigure(self, config: GatewayConfig, tenants: Tenants) -> None:
        """Other settings for the requests to come. Times on workers stay as they are."""
        self._config, self._tenants = config, tenants
        self._gate.reconfigure(config.admission)

    async def generate(self, inbound: Inbound, kind: RouteKind, client: Client) -> None:
        """A chat or text completion. Raises :class:`ApiError` if it reached no worker."""
        begun = self._clock()
        request = await aside(len(inbound.body) > LARGE_BODY, openai.parse, kind, inbound.body)
        self._parsed(self._clock() - begun)
        if request.model is None:
            raise BadRequest("'model' is required.", param="model", code="model_not_found")
        inbound.model = request.model
        if self._sample is not None:
            self._sample(inbound)
        own = request.cache_salt or ""
        salt = self._tenants.salt(inbound.tenant, own)
        if salt != own:
            request = msgspec.structs.replace(request, cache_salt=salt)
        profile = self._router.profile(inbound.model)
        prompt = await self._prompts.read(request, profile) if profile is not None else None
        if prompt is not None and prompt.n_tokens:
            self._tokenized(prompt.seconds)
        if prompt is not None and prompt.keys:
            self._hashed(prompt.hash_s)
        item = work.generation(inbound, request, prompt, self._config)
        item.salt = "" if salt == own else salt
        await self._run(item, client)

    async def relay(self, inbound: Inbound, client: Client) -> None:
        """Any other POST: to a worker that has the model, by load. Raises :class:`ApiError`."""
        large, models = len(inbound.body) > LARGE_BODY, self._router.base_models()
        inbound.model = await aside(large, relayedbodies.model_of, inbound, models)
        if inbound.route in dialogue.ROUTES:
            item = await self._dialogue(inbound)
        else:
            item = work.relayed(inbound, inbound.model, self._config)
        await self._run(item, client)

    async def stored(self, inbound: Inbound, response: str, method: str, client: Client) -> None:
        """Something about a stored response: asked of the worker that gave it.

        Where nobody knows who did, any worker of the only model may say that it does not have it.
        Among tenants that would show one of them what another one has. Raises :class:`ApiError`.
        """
        giver = await self._givers.giver(inbound.tenant, response)
        model = None if giver is None else self._router.pool(giver)
        models = [] if self._tenants.needed else self._router.base_models()
        if model is None and len(models) == 1:
            model = models[0]
        if model is None:
            raise NotFound("No such response is known here.", code="not_found")
        inbound.model = model
        item = work.relayed(inbound, model, self._config)
        item.method = method
        if giver is not None:
            item.elsewhere = self._router.others(model, giver)
        await self._run(item, client)

    async def _dialogue(self, inbound: Inbound) -> Work:
        """A response or a message, known by its text; engines take a salt there too."""
        begun = self._clock()
        large = len(inbound.body) > LARGE_BODY
        asked = await aside(large, dialogue.read, inbound.route, inbound.body)
        self._parsed(self._clock() - begun)
        salt = self._tenants.salt(inbound.tenant, asked.salt)
        profile = self._router.profile(inbound.model)
        prompt = Prompt()
        if profile is not None:
            prompt = self._prompts.read_text(asked.text, profile, salt)
            self._hashed(prompt.hash_s)
        item = work.dialogue(inbound, inbound.model, asked, prompt, self._config)
        item.salt = "" if salt == asked.salt else salt
        if asked.previous:
            giver = await self._givers.giver(inbound.tenant, asked.previous)
            if giver is not None:
                item.elsewhere = self._router.others(inbound.model, giver)
        return item

    def abort_all(self) -> None:
        """End all running answers with an error (the time to drain is over)."""
        for item in list(self._running):
            item.cut(Cut.SHUTDOWN)

    def give_up(self, worker: WorkerId) -> None:
        """A worker hangs: what it has not begun to answer is asked of others, if there are any."""
        for item in [one for one in self._running if one.waits_for(worker)]:
            if item.asking and isinstance(self._decide(item), Route):
                item.give_up()

    async def _enter(self, item: Work, tenant: str) -> None:
        """Its tenant may ask so much. Raises ``RateLimited`` (see ``Limiter``)."""
        limits = self._tenants.limits(tenant)
        try:
            await self._limiter.enter(tenant, limits, item.query.prompt_tokens)
        except (RateLimited, NoCapacity) as error:
            raise self._endings.rejected(item, Reject(error, "tenant_limit")) from None

    async def _run(self, item: Work, client: Client) -> None:
        """All attempts of one request, and every way out of them."""
        tenant = item.inbound.tenant
        if self._tenants.limits(tenant).any:
            await self._enter(item, tenant)
        else:
            self._limiter.count(tenant)
        try:
            loop = asyncio.get_running_loop()
            item.task, item.client = asyncio.current_task(loop), client
            if self._spans is not None:
                item.trace = self._spans.begin(item.inbound.headers)
            self._running.add(item)
            self._budget.request()
            self._deadlines.add(item, item.timeout_s, loop)
            await self._attempts(item, client)
        except ClientGone:
            self._endings.end(item, Outcome.CLIENT_GONE, CLIENT_CLOSED)
        except asyncio.CancelledError:
            error = self._why_cut(item)
            if error is None:
                self._endings.end(item, Outcome.CLIENT_GONE, CLIENT_CLOSED)
                raise
            await self._fail(item, client, error, Outcome.DEADLINE)
        finally:
            self._limiter.leave(tenant)
            self._deadlines.done(item)
            # Still open only after an error that nobody foresaw, which is not the worker's.
            if item.lease is not None:
                self._endings.end(item, Outcome.CLIENT_GONE, 500)
            self._running.discard(item)

    def _why_cut(self, item: Work) -> ApiError | None:
        """What to tell the client of a request that was cancelled; None: it was not us alone."""
        if item.why is None or item.task is None or item.task.uncancel():
            return None
        if item.why is Cut.SHUTDOWN:
            return NoCapacity("The gateway is shutting down.", retry_after_s=1.0)
        return DeadlineExceeded(f"No complete answer within {item.timeout_s:g} s.")

    async def _attempts(self, item: Work, client: Client) -> None:
        await self._first_worker(item)
        while True:
            failure = await self._attempt(item, client)
            if failure is None:
                return
            another = self._another(item, failure)
            self._endings.end(
                item,
                failure.outcome,
                failure.answer.status,
                final=another is None,
                silent=failure.reason == refusals.SILENT,
            )
            if another is None:
                await client.send(item.marked(failure.answer))
                return
            self._metrics.retry(failure.reason)
            number = len(item.tried) + 1
            item.attempt(another, self._router.begin(another, self._clock(), attempt=number))

    async def _first_worker(self, item: Work) -> None:
        """Bind the request to a worker, as soon as one has room."""
        gate, waited = self._gate, 0.0
        own_s: float | None = 0.0
        if (
            gate.queue.waiting(item.query.model)
            or (own_s := self._bind(item, gate.may_hold)) is not None
        ):
            waited = await self._wait(item, own_s or 0.0)
        self._metrics.waited(waited)
        self._metrics.overhead(self._clock() - item.inbound.arrived - waited)

    async def _wait(self, item: Work, own_s: float) -> float:
        """Wait in the gateway until a worker has room; how many seconds that took."""
        begun = self._clock()
        bind = partial(self._bind, item)
        try:
            item.ticket = await self._gate.passes(item.query, item.expected_tokens, bind, own_s)
        except Shed as error:
            raise self._endings.rejected(item, Reject(error, error.reason)) from None
        return self._clock() - begun

    def _bind(self, item: Work, may_hold: bool) -> float | None:
        """See :data:`gateway.gate.Bind`."""
        decision = self._decide(item)
        if isinstance(decision, Reject):
            raise self._endings.rejected(item, decision)
        config = self._config.admission
        route = with_room(decision, config.inflight_per_worker)
        if route is None or (may_hold and not soon(route, config.hold_wait_ms / 1e3)):
            ahead_s = decision.chosen.candidate.worker.booked_prefill_s
            return max(0.0, decision.predicted_ttft_s - ahead_s)
        item.attempt(route, self._router.begin(route, self._clock(), attempt=1))
        return None

    async def _attempt(self, item: Work, client: Client) -> AttemptFailed | None:
        """One attempt; None if the client has an answer (be it one that ends in an error event)."""
        assert item.lease is not None
        headers = item.headers if item.trace is None else item.trace.outgoing(item.headers)
        if item.shared and engine(item.lease.engine).salting is Salting.TAIL:
            headers = plus(headers, (sharedprefix.HEADER, item.shared))
        body = work.body_for(item, self._recalling)
        call = self._upstream.open(
            item.lease.url, item.path, headers, body, timeouts=self._timeouts, method=item.method
        )
        item.asking, item.given_up = True, False
        try:
            async with call as response:
                await attempt.deliver(
                    item, response, client, self._endings.end, self._endings.gave, self._clock
                )
        except UpstreamError as error:
            return refusals.from_upstream(error)
        except asyncio.CancelledError:
            if not item.given_up or item.task is None or item.task.uncancel():
                raise
            return refusals.from_upstream(UpstreamTimeout("the worker answers nothing any more"))
        except AttemptFailed as failure:
            if failure.reason == refusals.MODEL_GONE:
                self._suspect(item.lease.worker)
            if not failure.retry:  # a refusal shows that the worker is alive
                self._budget.success()
            return failure
        finally:
            item.asking = False
        self._budget.success()
        return None

    def _decide(self, item: Work) -> Route | Reject:
        begun = self._clock()
        try:
            decision = self._router.decide(
                item.query,
                begun,
                policy=item.policy,
                exclude=[*item.tried, *item.elsewhere] if item.elsewhere else item.tried,
            )
        except KeyError:
            reason = f"There is no policy '{item.policy}'."
            raise BadRequest(reason, param="x-headwater-policy") from None
        seconds = self._clock() - begun
        if isinstance(decision, Route):
            self._looked_up(decision.lookup_s)
            seconds -= decision.lookup_s
        self._ranked(seconds)
        return work.settled(item, decision)

    def _another(self, item: Work, failure: AttemptFailed) -> Route | None:
        """The route of one more attempt, if there may be one."""
        if not failure.retry or len(item.tried) > self._config.routing.retries:
            return None
        if not self._budget.take(len(self._running)):
            return None
        decision = self._decide(item)
        return decision if isinstance(decision, Route) else None

    async def _fail(self, item: Work, client: Client, error: ApiError, outcome: Outcome) -> None:
        """Tell a client why its answer does not go on."""
        self._endings.end(item, outcome, error.status)
        answer = error_answer(error)
        try:
            if not client.started:
                await client.send(item.marked(answer))
            elif item.tap is not None:
                await client.write(error_event(answer.body))
                await client.finish()
            elif item.relayed:
                await client.write(relayedstream.error_event(error.body()["error"]))
                await client.finish()
            else:
                client.abort()
        except ClientGone:
            return
