"""Traces: what a collector gets from a gateway and a worker, over OTLP, and what it never gets."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from rig import CHAT, answer, ask, chat, completion, eventually

from gateway.config import GatewayConfig
from gateway.spans import Tracing
from shared.errors import ConfigError
from shared.settings import load
from shared.spans import Parent, open_export, read_parent
from worker.config import WorkerConfig
from worker.tracing import closing, traced

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing on stderr."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Sent]:
        told = [ExportTraceServiceRequest.FromString(body) for body in list(self.bodies)]
        return [
            span
            for one in told
            for resource in one.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def said(span: Sent) -> dict[str, object]:
    found: dict[str, object] = {}
    for one in span.attributes:
        found[one.key] = getattr(one.value, one.value.WhichOneof("value") or "string_value")
    return found


async def test_a_request_and_its_attempts_become_spans_under_the_callers(
    stub, serve, collector: Collector
) -> None:
    first, second = await stub(), await stub()
    served = await serve(first, second, **{"telemetry.otlp_endpoint": collector.url})
    for worker in (first, second):
        worker.plays(answer({"error": {"message": "x"}}, 503), completion())
    header = ("traceparent", f"00-{TRACE}-{CALLER}-01")
    reply = await ask(served.url, CHAT, chat("secret words"), header, ("Authorization", "Bearer k"))
    assert reply.status in (200, 503)
    await eventually(lambda: len(collector.spans()) >= 3, 10)
    spans = collector.spans()
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    [whole] = [span for span in spans if span.kind == Sent.SPAN_KIND_SERVER]
    attempts = [span for span in spans if span.kind == Sent.SPAN_KIND_CLIENT]
    assert whole.parent_span_id.hex() == CALLER
    assert {span.parent_span_id for span in attempts} == {whole.span_id}
    assert len({span.span_id for span in spans}) == len(spans) == 3
    seen = [one.header("traceparent") for worker in (first, second) for one in worker.seen]
    assert set(seen) == {f"00-{TRACE}-{span.span_id.hex()}-01" for span in attempts}
    by_number = {said(span)["headwater.attempt"]: span for span in attempts}
    assert by_number[1].status.code == Status.STATUS_CODE_ERROR
    told = said(whole)
    assert (told["http.route"], told["gen_ai.request.model"]) == (CHAT, "m")
    assert told["http.response.status_code"] == reply.status
    assert told["headwater.policy"] == "cost"
    for span in attempts:
        assert said(span)["headwater.worker"] in (first.id, second.id)
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
    for secret in (b"secret", b"Bearer"):
        assert not any(secret in body for body in collector.bodies)


async def test_without_a_collector_the_callers_context_passes_as_it_is(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    header = f"00-{TRACE}-{CALLER}-01"
    await ask(served.url, CHAT, chat(), ("traceparent", header), ("tracestate", "a=1"))
    assert worker.seen[0].header("traceparent") == header
    assert worker.seen[0].header("tracestate") == "a=1"


async def test_a_collector_that_is_gone_costs_no_request(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker, **{"telemetry.otlp_endpoint": "http://127.0.0.1:9/v1/traces"})
    for _ in range(5):
        assert (await ask(served.url, CHAT, chat())).status == 200
    assert read_parent(worker.seen[0].header("traceparent")) is not None


class Kept:
    """Takes what would be exported."""

    def __init__(self) -> None:
        self.makings: list[object] = []

    def add(self, making: object) -> None:
        self.makings.append(making)


@pytest.mark.parametrize("sample", [0.0, 0.25, 1.0])
def test_who_is_traced(sample: float) -> None:
    tracing = Tracing(Kept(), Random(1), sample)  # type: ignore[arg-type]  # a stand-in
    count = sum(tracing.begin({}) is not None for _ in range(2000))
    assert abs(count - 2000 * sample) <= 100
    assert tracing.begin({"traceparent": f"00-{TRACE}-{CALLER}-01"}) is not None
    assert tracing.begin({"traceparent": f"00-{TRACE}-{CALLER}-00"}) is None


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00-a-b-01",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{CALLER}-01-more",
        f"00-{TRACE.upper()}-{CALLER}-01",
        f"00-{TRACE}-{CALLER}-1",
    ],
)
def test_what_is_no_context_begins_a_new_one(header: str | None) -> None:
    assert read_parent(header) is None


def test_contexts_of_later_versions_are_read() -> None:
    known = Parent(int(TRACE, 16), int(CALLER, 16), True)
    assert read_parent(f"00-{TRACE}-{CALLER}-01") == known
    assert read_parent(f"01-{TRACE}-{CALLER}-03-more") == known


async def test_a_worker_goes_on_with_the_context(collector: Collector) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    export = open_export(collector.url, "headwater-worker")
    assert export is not None
    app = web.Application(middlewares=[traced(export, Random(1))])
    app.router.add_post(CHAT, handler)
    app.on_cleanup.append(closing(export))
    async with TestClient(TestServer(app)) as client:
        for header in (f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00", "none"):
            reply = await client.post(CHAT, headers={"traceparent": header})
            assert reply.status == 200
    [span] = collector.spans()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert said(span) == {"http.route": CHAT, "http.response.status_code": 200}


def test_one_environment_serves_gateway_and_worker() -> None:
    """`headwater up` hands its own to both: a key that only one knows would stop the other."""
    ours = {field.name: field.type for field in msgspec.structs.fields(GatewayConfig)}
    theirs = {field.name: field.type for field in msgspec.structs.fields(WorkerConfig)}
    both = ours.keys() & theirs.keys()
    assert both >= {"redis", "deployment", "log", "telemetry"}
    for section in both:
        assert ours[section].__struct_fields__ == theirs[section].__struct_fields__, section
    env = {"HEADWATER_TELEMETRY__SAMPLE": "0.5"}
    assert load(GatewayConfig, file=None, env=env, flags={}).telemetry.sample == 0.5
    assert load(WorkerConfig, file=None, env=env, flags={}).telemetry.sample == 0.5


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="URL"):
        open_export("otel:4318", "x")
    assert open_export("", "x") is None


def test_gateway_and_worker_need_no_sdk_unless_told() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None;"
        "import gateway.build, worker.server, shared.spans;"
        "sys.exit(shared.spans.open_export('', 'x') is not None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_without_the_extra_the_endpoint_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"headwater\[otel\]"):
        open_export("http://otel:4318/v1/traces", "x")
