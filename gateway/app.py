"""The public listener: who may call, which route it is, and one log line per request.

Routes are matched on the exact path. Everything but ``OPEN`` needs a key once there are keys; that
is checked before the route is looked up, so a new route cannot be left out.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from urllib.parse import unquote

import structlog

from gateway.accesslog import AccessLine, AccessLog
from gateway.config import ListenConfig
from gateway.exchange import Answer, ClientGone, Inbound, error_answer
from gateway.httpserver import check_json, json_answer
from gateway.openapi import OPENAPI, document
from gateway.pipeline import CLIENT_CLOSED, Pipeline
from gateway.router import Router
from gateway.stored import STORED, response_of, stored_route
from gateway.telemetry import PrometheusSink
from gateway.tenancy import Tenants
from gateway.wire.answers import WireClient
from gateway.wire.request import ServerRequest
from gateway.wire.served import ServerConnection
from shared.errors import (
    ApiError,
    InternalError,
    MethodNotAllowed,
    ModelNotFound,
    NoCapacity,
    NotFound,
    Unauthorized,
)
from shared.openai import RouteKind
from shared.types import RequestId

OPEN = frozenset({"/health", "/ready"})
"""Routes that need no key."""
GENERATE = {
    "/v1/chat/completions": RouteKind.CHAT,
    "/v1/completions": RouteKind.COMPLETIONS,
}
RELAYED = frozenset(
    {
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/tokenize",
        "/detokenize",
    }
)
OTHER_V1 = "/v1/*"
MODELS = "/v1/models"
MODEL = "/v1/models/{id}"
OPERATORS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes of workers that name folders on their machine: never passed on."""
READS = frozenset({*OPEN, MODELS, MODEL, OPENAPI})
OTHER = "other"
"""Label of all paths that are no route."""

_POST = ("POST",)
_MEMO, _IS_JSON = "route", "json"
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request can be served, why not, and what does not work as well as it could."""

    ready: bool
    reasons: list[str]
    notes: list[str]


def route_of(path: str, method: str = "POST") -> str:
    """The documented name of a path's route; ``other`` if there is none."""
    if path in GENERATE or path in RELAYED or path in READS:
        return path
    if (stored := stored_route(path, method)) is not None:
        return stored
    if path.startswith(f"{MODELS}/"):
        return MODEL
    if path.startswith("/v1/") and len(path) > len("/v1/") and _relayable(path):
        return OTHER_V1
    return OTHER


def _relayable(path: str) -> bool:
    """The path means the same to every worker, and is no disguise of one of our own routes.

    What a worker may read as another path (dot segments leave ``/v1/``) is not passed on.
    """
    plain = unquote(path)
    if any(part in ("", ".", "..") for part in plain.rstrip("/").split("/")[1:]):
        return False
    if "\\" in plain or not plain.isprintable():
        return False
    bare = plain.split(";", 1)[0].rstrip("/")
    return not any(bare in ours for ours in (GENERATE, RELAYED, READS, OPERATORS))


class App:
    """Handles the requests of the public listener."""

    def __init__(
        self,
        config: ListenConfig,
        pipeline: Pipeline,
        router: Router,
        metrics: PrometheusSink,
        readiness: Callable[[], Readiness],
        access: AccessLog,
        tenants: Tenants,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline, self._router, self._metrics = pipeline, router, metrics
        self._readiness, self._clock = readiness, clock
        self.reconfigure(config, access, tenants)
        self._created = int(time.time())
        self._log = structlog.get_logger("headwater.app")
        self._ids = Random(os.urandom(32))
        self.busy = 0
        """Requests being served now."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.draining = False
        """New requests are turned away."""

    def reconfigure(self, config: ListenConfig, access: AccessLog, tenants: Tenants) -> None:
        """Other keys, limits and lines in the log for the requests to come."""
        self._access = access
        self._tenants = tenants
        self._max_body = int(config.max_body_mib * 2**20)

    async def handle(self, request: ServerRequest, connection: ServerConnection) -> None:
        """Answer one request; the server's entry point."""
        memo = request.memo
        seen: tuple[str, str] | None = memo.get(_MEMO)
        if seen is None:
            own = request.headers.get("x-request-id", "")
            own = own if _PLAIN_ID.fullmatch(own) else ""
            seen = memo[_MEMO] = route_of(request.path, request.method), own
        route, own = seen
        request_id = RequestId(f"req-{self._ids.getrandbits(96):024x}")
        inbound = Inbound(
            request_id=request_id,
            route=route,
            target=request.target,
            headers=request.headers,
            body=b"",
            arrived=self._clock(),
            wall_at=time.time(),
            client_id=own,
            memo=memo,
        )
        # Of the client's own ids only plain ones come this far.
        client = WireClient(
            request, connection, b"x-request-id: %b\r\n" % (own or request_id).encode()
        )
        try:
            await self._dispatch(request, inbound, client)
        except ApiError as error:
            # An early answer may leave a body unread: the connection is of no use then.
            client.close = error.status in (408, 413) or self.draining
            await client.send(_with_hints(error_answer(error), error))
        except ClientGone as error:
            raise ConnectionResetError from error
        except Exception:  # noqa: BLE001 - the edge: whatever it is, the client gets JSON
            self._log.exception("request_failed", id=inbound.request_id, route=inbound.route)
            if client.started:
                client.abort()
            else:
                await client.send(error_answer(InternalError("The gateway failed.")))
        finally:
            self._tell(inbound, client.status or CLIENT_CLOSED)

    async def _dispatch(self, request: ServerRequest, inbound: Inbound, client: WireClient) -> None:
        route, method = inbound.route, request.method
        if route not in OPEN:
            inbound.tenant = self._authenticate(request.headers)
        if route == OTHER:
            raise NotFound("There is no such route.")
        if route in READS or (route == OTHER_V1 and method in ("GET", "HEAD")):
            await client.send(self._read(route, request))
            return
        allowed = STORED.get(route, _POST)
        if method not in allowed:
            raise MethodNotAllowed(f"This route takes {' and '.join(allowed)} only.", allowed)
        self._refuse_if_draining()
        kind = GENERATE.get(route)
        if kind is not None and _IS_JSON not in request.memo:
            check_json(request.headers)
            request.memo[_IS_JSON] = True
        inbound.body = await request.body(self._max_body)
        if self.draining:  # since it came in
            self._refuse_if_draining()
        # What is being served; a body that is still coming in (slowly) holds up no shutdown.
        if not self.busy:
            self.idle.clear()
        self.busy += 1
        try:
            if kind is not None:
                await self._pipeline.generate(inbound, kind, client)
            elif route in STORED:
                await self._pipeline.stored(inbound, response_of(request.path), method, client)
            else:
                await self._pipeline.relay(inbound, client)
        finally:
            self.busy -= 1
            if not self.busy:
                self.idle.set()

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise NoCapacity("The gateway is shutting down.", retry_after_s=1.0)

    def _authenticate(self, headers: Mapping[str, str]) -> str:
        """Name of the tenant whose key it is; empty if none is needed."""
        if not self._tenants.needed:
            return ""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        tenant = self._tenants.of_key(given.encode("utf-8", "surrogateescape"))
        if tenant is None:
            raise Unauthorized("A valid API key is required.")
        return tenant.name

    def _read(self, route: str, request: ServerRequest) -> Answer:
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed("This route takes GET only.", ("GET", "HEAD"))
        if route == "/health":
            return json_answer({"status": "alive"})
        if route == "/ready":
            return self._ready()
        if route == OPENAPI:
            return Answer(200, document("public"), [("Content-Type", "application/json")])
        if route == MODELS:
            models = [self._model(name) for name in self._router.models()]
            return json_answer({"object": "list", "data": models})
        if route == MODEL:
            name = unquote(request.path.removeprefix(f"{MODELS}/"))
            if name not in self._router.models():
                raise ModelNotFound("There is no such model.", param="model")
            return json_answer(self._model(name))
        raise NotFound("There is no such route.")

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "headwater",
            "root": name,
            "parent": self._router.parent(name),
        }

    def _ready(self) -> Answer:
        if self.draining:
            return json_answer({"status": "draining", "reasons": ["shutting down"]}, 503)
        state = self._readiness()
        body = {
            "status": "ready" if state.ready else "unavailable",
            "reasons": state.reasons,
            "notes": state.notes,
        }
        return json_answer(body, 200 if state.ready else 503)

    def _tell(self, inbound: Inbound, status: int) -> None:
        """The access log and the request counter. Never what was asked or answered."""
        self._metrics.request(inbound.route, inbound.model, status)
        if inbound.route in OPEN:
            return
        total_s, record = round(self._clock() - inbound.arrived, 6), inbound.record
        name, model = inbound.request_id, inbound.model[:128]
        if record is None:
            line = AccessLine(name, inbound.route, model, status, total_s)
        else:
            ttft_s, flow = record.ttft_s, record.flow
            line = AccessLine(
                name,
                inbound.route,
                model,
                status,
                total_s,
                record.worker,
                record.outcome,
                record.attempt,
                flow.prompt,
                flow.delivered,
                record.output_tokens,
                None if ttft_s is None else round(ttft_s, 6),
            )
        self._access.tell(line)


def _with_hints(answer: Answer, error: ApiError) -> Answer:
    if isinstance(error, Unauthorized):
        answer.headers.append(("WWW-Authenticate", "Bearer"))
    elif isinstance(error, MethodNotAllowed):
        answer.headers.append(("Allow", ", ".join(error.allowed)))
    return answer
