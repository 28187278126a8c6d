"""The pipeline with fakes for the worker and the client: every way out, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rig import CHAT, DONE, ROLE, STOP, chat, delta, usage, usage_event

from gateway.config import GatewayConfig, RoutingConfig
from gateway.decision import AttemptEnd
from gateway.exchange import Answer, ClientGone, Headers, Inbound
from gateway.index.table import PrefixTable
from gateway.lease import Lease
from gateway.openers import open_givers, open_limiter
from gateway.parts import Parts
from gateway.pipeline import Pipeline
from gateway.prompts import Prompt
from gateway.records import Outcome, RequestRecord
from gateway.router import Router
from gateway.routing.catalogue import make_policies
from gateway.telemetry import PrometheusSink
from gateway.tenancy import Meters, Tenants
from gateway.upstream import Taker, UpstreamBroken, UpstreamConnectError, UpstreamTimeout
from shared.errors import ApiError, BadRequest, ModelNotFound, NoCapacity
from shared.load import WorkerInfo
from shared.openai import RouteKind
from shared.types import Epoch, RequestId, WorkerId

SSE = ("Content-Type", "text/event-stream")
JSON = ("Content-Type", "application/json")


class FakeResponse:
    """Plays pieces: bytes, exceptions to raise, or events to wait for."""

    def __init__(self, status: int, headers: Headers, pieces: list[Any]) -> None:
        self.status, self.headers, self._pieces = status, headers, list(pieces)
        self.content_type = dict(headers).get("Content-Type", "")

    async def read(self) -> bytes:
        if not self._pieces:
            return b""
        piece = self._pieces.pop(0)
        if isinstance(piece, asyncio.Event):
            await piece.wait()
            return await self.read()
        if isinstance(piece, Exception):
            raise piece
        return piece

    def rest(self) -> bytes | None:
        return None

    async def pass_on(self, taker: Taker) -> bytes:
        while (data := await self.read()) and taker.take(data):
            pass
        return data

    async def settle(self, grace_s: float) -> None:
        pass


class FakeCall:
    def __init__(self, upstream: FakeUpstream, response: FakeResponse | Exception) -> None:
        self._upstream, self._response = upstream, response

    async def __aenter__(self) -> FakeResponse:
        self._upstream.open_calls += 1
        if isinstance(self._response, Exception):
            self._upstream.open_calls -= 1
            raise self._response
        return self._response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._upstream.open_calls -= 1


class FakeUpstream:
    """Answers calls from a list."""

    def __init__(self) -> None:
        self.answers: list[FakeResponse | Exception] = []
        self.calls: list[tuple[str, str, Headers, bytes]] = []
        self.open_calls = 0

    def open(self, url: str, path: str, headers: Any, body: bytes, **_: Any) -> FakeCall:
        self.calls.append((url, path, list(headers), body))
        return FakeCall(self, self.answers.pop(0))

    async def close(self) -> None:
        pass


class FakeClient:
    """Keeps what it is sent; leaves after ``leave_after`` writes."""

    def __init__(self, leave_after: int | None = None) -> None:
        self.answer: Answer | None = None
        self.status = 0
        self.headers: Headers = []
        self.data = b""
        self.started = self.finished = self.aborted = False
        self._left = leave_after

    async def send(self, answer: Answer) -> None:
        assert not self.started
        self.answer, self.status, self.headers = answer, answer.status, answer.headers

    async def start(self, status: int, headers: Headers) -> None:
        self.started, self.status, self.headers = True, status, headers

    async def write(self, data: bytes) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise ClientGone
        self.data += data

    @property
    def flowing(self) -> bool:
        return self.started and self._left is None

    def put(self, data: bytes) -> None:
        assert self.flowing
        self.data += data

    async def finish(self) -> None:
        self.finished = True

    def abort(self) -> None:
        self.aborted = True


class NoPrompts:
    """Stands in for ``Prompts``: nothing is known of any prompt."""

    async def read(self, request: object, profile: object) -> Prompt:
        return Prompt((), 7)


class Kept:
    """A sink that keeps records."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def record(self, record: RequestRecord) -> None:
        self.records.append(record)


class Bench:
    """A pipeline over two workers, a virtual clock, and everything around it faked."""

    def __init__(self, **routing: Any) -> None:
        config = GatewayConfig(routing=RoutingConfig(policy="round_robin", **routing))
        rng = Random(1)
        index = PrefixTable(1000, rng)
        self.router = Router(index, make_policies(config.routing), config.routing, rng)
        for name in ("w1", "w2"):
            info = WorkerInfo(WorkerId(name), Epoch(1), f"http://{name}", ("m",), event_feed=False)
            self.router.join(info, 0.0)
            self.router.set_health(WorkerId(name), True, 0.0, "")
        self.upstream, self.kept, self.now = FakeUpstream(), Kept(), 100.0
        self.suspected: list[WorkerId] = []
        self.sampled: list[Inbound] = []
        self.registry = CollectorRegistry()
        metrics = PrometheusSink(self.registry, lambda model: model == "m")
        self.pipeline = Pipeline(
            Parts(
                router=self.router,
                prompts=NoPrompts(),  # type: ignore[arg-type]  # all that the pipeline calls
                upstream=self.upstream,
                metrics=metrics,
                sinks=[metrics, self.kept],
                sample=self.sampled.append,
                config=config,
                tenants=Tenants({}, b"", isolate=True),
                limiter=open_limiter(config, Meters()),
                givers=open_givers(config),
                suspect=self.suspected.append,
                clock=lambda: self.now,
            )
        )

    def inbound(self, body: Any, **headers: str) -> Inbound:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Inbound(
            request_id=RequestId("r1"),
            route=CHAT,
            target=CHAT,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
            body=data,
            arrived=self.now,
            wall_at=5.0,
        )

    async def chat(self, client: FakeClient | None = None, **fields: Any) -> FakeClient:
        client = client or FakeClient()
        await self.pipeline.generate(self.inbound(chat(**fields)), RouteKind.CHAT, client)
        return client

    def idle(self) -> bool:
        return (
            all(worker.inflight == 0 for worker in self.router.workers(self.now))
            and self.upstream.open_calls == 0
        )

    def outcomes(self) -> list[tuple[Outcome, bool, int]]:
        return [(r.outcome, r.final, r.attempt) for r in self.kept.records]


def whole(body: Any = None, status: int = 200) -> FakeResponse:
    data = {"choices": [], "usage": usage()} if body is None else body
    return FakeResponse(status, [JSON], [json.dumps(data).encode()])


def streamed(*pieces: Any) -> FakeResponse:
    return FakeResponse(200, [SSE], list(pieces))


async def test_a_whole_answer_is_recorded_with_its_usage() -> None:
    bench = Bench()
    bench.upstream.answers = [whole()]
    client = await bench.chat()
    assert client.status == 200
    (record,) = bench.kept.records
    assert (record.outcome, record.status, record.final) == (Outcome.OK, 200, True)
    assert (record.flow.prompt, record.flow.delivered, record.output_tokens) == (7, 4, 3)
    assert record.at == 5.0
    assert bench.idle()
    told = dict(client.headers)
    assert told["x-headwater-worker"] == record.worker
    assert told["x-headwater-attempts"] == "1"
    assert told["x-headwater-prompt-tokens"] == "7"


async def test_only_workers_of_ours_are_told_what_tenants_share() -> None:
    bench = Bench()
    shares = Prompt((), 7, shared="16:" + "0" * 32)

    async def read(request: object, profile: object) -> Prompt:
        return shares

    bench.pipeline._prompts.read = read  # type: ignore[method-assign, assignment]
    for name in ("vllm", "sglang", "openai"):
        info = WorkerInfo(WorkerId(name), Epoch(1), f"http://{name}", ("m",), engine=name)
        bench.router.join(info, 0.0)
        bench.router.set_health(WorkerId(name), True, 0.0, "")
    bench.upstream.answers = [whole() for _ in range(10)]
    for _ in range(10):
        inbound = bench.inbound(chat(), x_headwater_shared_prefix="1:" + "f" * 32)
        await bench.pipeline.generate(inbound, RouteKind.CHAT, FakeClient())
    told = [
        (url, [value for name, value in headers if name == "x-headwater-shared-prefix"])
        for url, _, headers, _ in bench.upstream.calls
    ]
    assert len({url for url, _ in told}) == 5
    assert all(values == ([shares.shared] if "/w" in url else []) for url, values in told)


async def test_a_stream_is_recorded_with_its_times() -> None:
    bench = Bench()
    bench.upstream.answers = [streamed(ROLE, delta("a"), delta("b"), STOP, usage_event(), DONE)]
    client = await bench.chat(stream=True)
    assert client.finished
    assert client.data == ROLE + delta("a") + delta("b") + STOP + DONE
    (record,) = bench.kept.records
    assert record.ttft_s is not None
    assert record.reported
    sent = json.loads(bench.upstream.calls[0][3])
    assert sent["stream_options"] == {"include_usage": True}
    assert bench.idle()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UpstreamConnectError("x"), 503),
        (UpstreamBroken("x"), 502),
        (UpstreamTimeout("x"), 504),
        (whole({"error": {"message": "x"}}, 500), 500),
        (whole({"error": {"message": "x"}}, 503), 503),
        (streamed(ROLE, UpstreamBroken("x")), 502),
        (streamed(ROLE), 502),
        (FakeResponse(302, [], []), 502),
    ],
)
async def test_each_worker_is_tried_once(error: Any, status: int) -> None:
    def again() -> Any:
        if isinstance(error, Exception):
            return error
        return FakeResponse(error.status, error.headers, error._pieces)

    bench = Bench()
    bench.upstream.answers = [again(), again()]
    client = await bench.chat(stream=True)
    assert client.status == status
    assert json.loads(client.answer.body)["error"]["message"]
    assert {url for url, *_ in bench.upstream.calls} == {"http://w1", "http://w2"}
    assert bench.outcomes() == [
        (Outcome.UPSTREAM_ERROR, False, 1),
        (Outcome.UPSTREAM_ERROR, True, 2),
    ]
    assert [r.flow.prompt for r in bench.kept.records] == [0, 7]
    assert set(bench.suspected) == {"w1", "w2"}
    assert bench.idle()


@pytest.mark.parametrize(
    ("answer", "silent"),
    [
        (UpstreamTimeout("x"), True),
        (streamed(ROLE, UpstreamTimeout("x")), True),
        (UpstreamConnectError("x"), False),
        (UpstreamBroken("x"), False),
        (whole({"error": {"message": "x"}}, 504), False),
    ],
)
async def test_silence_is_told_from_other_failures(
    answer: Any, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is silent may be busy (``test_router_silence.py``); who sends a 504 is not silent."""
    ends: list[AttemptEnd] = []
    finish = Lease.finish

    def noted(lease: Lease, end: AttemptEnd, now: float) -> RequestRecord:
        ends.append(end)
        return finish(lease, end, now)

    monkeypatch.setattr(Lease, "finish", noted)
    bench = Bench(retries=0)
    bench.upstream.answers = [answer]
    await bench.chat(stream=True)
    assert [end.silent for end in ends] == [silent]


async def test_retries_can_be_switched_off() -> None:
    bench = Bench(retries=0)
    bench.upstream.answers = [UpstreamConnectError("x")]
    assert (await bench.chat()).status == 503
    assert len(bench.upstream.calls) == 1


async def test_a_second_worker_answers_for_the_first() -> None:
    bench = Bench()
    bench.upstream.answers = [streamed(ROLE, UpstreamBroken("x")), streamed(ROLE, delta("a"), STOP)]
    client = await bench.chat(stream=True)
    assert client.data == ROLE + delta("a") + STOP + DONE
    assert bench.outcomes() == [(Outcome.UPSTREAM_ERROR, False, 1), (Outcome.OK, True, 2)]
    assert dict(client.headers)["x-headwater-attempts"] == "2"


async def test_a_request_is_offered_as_a_sample_once_however_often_it_is_tried() -> None:
    bench = Bench()
    bench.upstream.answers = [UpstreamBroken("x"), streamed(ROLE, delta("a"), STOP, DONE)]
    await bench.chat(stream=True)
    assert len(bench.outcomes()) == 2
    assert [json.loads(one.body)["model"] for one in bench.sampled] == ["m"]


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
async def test_refusals_are_final(status: int) -> None:
    bench = Bench()
    bench.upstream.answers = [whole({"error": {"message": "no"}}, status)]
    client = await bench.chat(stream=True)
    assert client.status == status
    assert bench.outcomes() == [(Outcome.CLIENT_ERROR, True, 1)]
    assert bench.idle()


async def test_a_break_after_content_is_told_and_final() -> None:
    bench = Bench()
    bench.upstream.answers = [streamed(ROLE, delta("a"), UpstreamBroken("x"))]
    client = await bench.chat(stream=True)
    assert client.finished
    last = client.data.removeprefix(ROLE + delta("a"))
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert bench.outcomes() == [(Outcome.UPSTREAM_ERROR, True, 1)]
    assert bench.idle()


async def test_a_client_that_leaves_is_no_failure_of_the_worker() -> None:
    bench = Bench()
    bench.upstream.answers = [streamed(ROLE + delta("a"), delta("b"), STOP, DONE)]
    await bench.chat(FakeClient(leave_after=1), stream=True)
    assert bench.outcomes() == [(Outcome.CLIENT_GONE, True, 1)]
    assert bench.idle()


CANCEL_AT: dict[str, Callable[[asyncio.Event], Any]] = {
    "before the body": lambda event: streamed(event, ROLE),
    "in the stream": lambda event: streamed(ROLE, delta("a"), event),
    "in a whole answer": lambda event: FakeResponse(200, [JSON], [event]),
}


@pytest.mark.parametrize("where", CANCEL_AT)
async def test_cancellation_releases_everything(where: str) -> None:
    bench = Bench()
    bench.upstream.answers = [CANCEL_AT[where](asyncio.Event())]
    task = asyncio.create_task(bench.chat(stream=where != "in a whole answer"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.upstream.open_calls == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.outcomes() == [(Outcome.CLIENT_GONE, True, 1)]
    assert bench.idle()


@pytest.mark.parametrize("where", CANCEL_AT)
async def test_shutdown_tells_the_client(where: str) -> None:
    bench = Bench()
    bench.upstream.answers = [CANCEL_AT[where](asyncio.Event())]
    client = FakeClient()
    task = asyncio.create_task(bench.chat(client, stream=where != "in a whole answer"))
    for _ in range(5):
        await asyncio.sleep(0)
    bench.pipeline.abort_all()
    await task
    if where == "in the stream":
        assert client.finished
        assert b"shutting down" in client.data
    else:
        assert client.status == 503
    assert bench.idle()


async def test_a_deadline_ends_it() -> None:
    bench = Bench()
    bench.upstream.answers = [streamed(ROLE, asyncio.Event())]
    client = FakeClient()
    inbound = bench.inbound(chat(stream=True), x_headwater_timeout="0.001")
    await bench.pipeline.generate(inbound, RouteKind.CHAT, client)
    assert client.status == 504
    assert bench.outcomes() == [(Outcome.DEADLINE, True, 1)]
    assert bench.idle()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{", BadRequest),
        ({"messages": chat()["messages"]}, BadRequest),
        ({**chat(), "model": "other"}, ModelNotFound),
    ],
)
async def test_what_reaches_no_worker_raises(body: Any, error: type[ApiError]) -> None:
    bench = Bench()
    with pytest.raises(error):
        await bench.pipeline.generate(bench.inbound(body), RouteKind.CHAT, FakeClient())
    assert bench.upstream.calls == []


async def test_no_worker_is_503_and_recorded() -> None:
    bench = Bench()
    for name in ("w1", "w2"):
        bench.router.set_health(WorkerId(name), False, 0.0, "down")
    with pytest.raises((NoCapacity, ModelNotFound)):
        await bench.chat()
    (record,) = bench.kept.records
    assert (record.outcome, record.attempt, record.worker) == (Outcome.REJECTED, 0, "")


async def test_an_unforeseen_error_leaves_no_booking() -> None:
    bench = Bench()
    bench.upstream.answers = [RuntimeError("a bug")]
    with pytest.raises(RuntimeError):
        await bench.chat()
    assert bench.idle()
    assert len(bench.kept.records) == 1


async def test_the_policy_header_counts_only_if_allowed() -> None:
    for allowed in (False, True):
        bench = Bench(allow_policy_header=allowed)
        bench.upstream.answers = [whole()]
        inbound = bench.inbound(chat(), x_headwater_policy="least_loaded")
        await bench.pipeline.generate(inbound, RouteKind.CHAT, FakeClient())
        expected = "least_loaded" if allowed else "round_robin"
        assert bench.kept.records[0].policy == expected
    with pytest.raises(BadRequest):
        await bench.pipeline.generate(
            bench.inbound(chat(), x_headwater_policy="none such"), RouteKind.CHAT, FakeClient()
        )


async def test_other_bytes_are_cut_when_they_break() -> None:
    bench = Bench()
    audio = [("Content-Type", "audio/mpeg")]
    bench.upstream.answers = [FakeResponse(200, audio, [b"abc", UpstreamBroken("x")])]
    client = FakeClient()
    await bench.pipeline.relay(bench.inbound({"model": "m"}), client)
    assert (client.data, client.aborted, client.finished) == (b"abc", True, False)
    assert bench.idle()
