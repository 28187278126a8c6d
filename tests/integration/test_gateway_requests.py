"""What the gateway accepts and how it refuses (A08-A10, A15, A17, A19, E02, E05-E08, F01, F08)."""

from __future__ import annotations

import asyncio
import gzip
import json

import psutil
import pytest
from rig import (
    CHAT,
    Seen,
    answer,
    ask,
    chat,
    chunk,
    completion,
    delta,
    eventually,
    head,
    plain,
    stream,
)
from stopwatch import Stopwatch

from gateway import app
from gateway.wire import limits

BAD_BODIES = [
    b'{"model":"m",x}',
    b"[]",
    b'"str"',
    b"",
    b'{"model":"m"}',
    b'{"model":"m","messages":"hi"}',
    b'{"model":"m","messages":[]}',
    b'{"model":"m","messages":[{"role":"user"}],"temperature":"hot"}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":0,"stream":true}',
    b"[" * 10_000,
    b"\xff\xfe{",
]


def check_error(reply, *statuses: int) -> None:
    """A JSON error with one of these statuses."""
    assert reply.status in statuses, reply
    assert reply.header("content-type").startswith("application/json")
    error = reply.json["error"]
    assert error["message"]
    assert isinstance(error["type"], str)
    assert {"param", "code"} <= set(error)
    assert "Traceback" not in reply.body.decode()


async def test_bad_bodies_are_400_and_the_connection_lives(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    client = await dial(served.url)
    for body in BAD_BODIES:
        check_error(await client.ask("POST", CHAT, body), 400)
    assert worker.seen == []
    assert (await client.ask("POST", CHAT, json.dumps(chat()).encode())).status == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 200),
    ],
)
async def test_content_types(stub, serve, kind, status) -> None:
    served = await serve(await stub())
    reply = await ask(served.url, CHAT, chat(), ("Content-Type", kind))
    assert reply.status == status
    if status != 200:
        check_error(reply, 415)
        assert "content type" in reply.json["error"]["message"]


async def test_nulls_are_absent_fields(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    names = (
        "max_tokens max_completion_tokens temperature top_p n stop seed logprobs top_logprobs "
        "stream stream_options tools user logit_bias"
    ).split()
    body = json.dumps({**chat(), **dict.fromkeys(names)}).encode()
    assert (await ask(served.url, CHAT, body)).status == 200
    assert worker.seen[0].body == body


async def test_a_large_body_passes_byte_for_byte(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    body = json.dumps(chat("é\U0001f30d" * 500_000, big=2**70), ensure_ascii=False).encode()
    assert len(body) > 2_900_000
    assert (await ask(served.url, CHAT, body)).status == 200
    assert worker.seen[0].body == body


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413_and_not_stored(stub, serve, dial, chunked) -> None:
    worker = await stub()
    served = await serve(worker, **{"listen.max_body_mib": 2})
    size = 64 * 2**20
    client = await dial(served.url)
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    client.writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
        f"{framing}\r\n\r\n".encode()
    )
    before = psutil.Process().memory_info().rss
    peak = before
    block = b"x" * 65_536
    reading = asyncio.create_task(client.read())
    for _ in range(size // len(block)):
        client.writer.write(chunk(block) if chunked else block)
        try:
            await client.writer.drain()
        except ConnectionError:
            break
        peak = max(peak, psutil.Process().memory_info().rss)
        if reading.done():
            break
    check_error(await reading, 413)
    assert peak - before < 10 * 2**20
    assert worker.seen == []
    client.abort()
    assert (await ask(served.url, CHAT, chat())).status == 200


@pytest.mark.parametrize("route", [CHAT, "/v1/embeddings"])
async def test_encoded_answers_stay_consistent(stub, serve, route) -> None:
    worker = await stub()
    served = await serve(worker)
    content = json.dumps({"data": "x" * 300_000}).encode()

    def respond(seen: Seen):
        json_type = ("Content-Type", "application/json")
        if "gzip" in (seen.header("accept-encoding") or ""):
            return plain(gzip.compress(content), 200, json_type, ("Content-Encoding", "gzip"))
        return plain(content, 200, json_type)

    worker.respond = respond
    for accept in ("gzip", "identity"):
        reply = await ask(served.url, route, chat(), ("Accept-Encoding", accept))
        assert int(reply.header("content-length")) == len(reply.body)
        packed = reply.header("content-encoding") == "gzip"
        assert (gzip.decompress(reply.body) if packed else reply.body) == content
        assert accept == "gzip" or not packed


async def test_the_model_list_is_a_live_union(stub, serve) -> None:
    one, two, three = await stub(("m1", "m2")), await stub(("m2", "m3")), await stub(("m4",))
    await three.stop()
    served = await serve(one, two, three, wait=False)
    await eventually(lambda: len(served.gateway.router.models()) == 3)
    listed = (await ask(served.url, "/v1/models")).json
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["m1", "m2", "m3"]
    for card in listed["data"]:
        assert card["object"] == "model"
        assert isinstance(card["created"], int)
        assert card["owned_by"]
        assert (await ask(served.url, CHAT, {**chat(), "model": card["id"]})).status == 200
    assert (await ask(served.url, "/v1/models/m2")).json["id"] == "m2"
    check_error(await ask(served.url, "/v1/models/m9"), 404)
    one.seen.clear()
    two.seen.clear()
    for _ in range(4):
        assert (await ask(served.url, CHAT, {**chat(), "model": "m3"})).status == 200
    assert (len(one.seen), len(two.seen)) == (0, 4)
    for model in ({"model": "m9"}, {"model": None}, {"model": ""}, {}):
        reply = await ask(served.url, CHAT, {"messages": chat()["messages"], **model})
        check_error(reply, 404, 400)
        assert reply.json["error"]["code"] == "model_not_found"
    assert (len(one.seen), len(two.seen)) == (0, 4)
    await ask(served.admin, f"/admin/workers/{two.id}", method="DELETE")
    listed = (await ask(served.url, "/v1/models")).json
    assert [card["id"] for card in listed["data"]] == ["m1", "m2"]


async def test_other_routes_are_relayed_by_load(stub, serve) -> None:
    one, two = await stub(("a",)), await stub(("b",))
    served = await serve(one, two)
    one.plays(answer({"from": "one"}))
    two.plays(answer({"from": "two"}))
    for route in ("/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/anything/else?x=1"):
        reply = await ask(served.url, route, {"model": "b", "input": "x"})
        assert reply.json == {"from": "two"}
        assert two.seen[-1].target == route
    assert one.seen == []
    check_error(await ask(served.url, "/v1/embeddings", {"input": "x"}), 400)
    check_error(await ask(served.url, "/v1/anything"), 404)
    check_error(await ask(served.url, "/nothing", {}), 404)
    check_error(await ask(served.url, CHAT, method="GET"), 405)
    check_error(await ask(served.url, "/v1/models", {}), 405)


async def test_relayed_bodies_that_should_be_json_and_are_none_are_400(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    for route in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"):
        for body in (b"", b"{", b"[]", b'{"input": tru}'):
            reply = await ask(served.url, route, body)
            check_error(reply, 400)
            assert reply.json["error"]["message"].startswith("The body ")
    check_error(await ask(served.url, "/v1/anything", b"{"), 400)
    assert worker.seen == []
    packed = ("Content-Encoding", "gzip")
    for route, body, *headers in (
        ("/v1/anything", b""),
        ("/v1/anything", b"[]"),
        ("/v1/anything", b"{", ("Content-Type", "text/plain")),
        ("/v1/embeddings", gzip.compress(b"{}"), packed),
        ("/v1/embeddings", b'{"input": NaN}'),
    ):
        assert (await ask(served.url, route, body, *headers)).status == 200
        assert worker.seen[-1].body == body


async def test_every_route_needs_the_key(stub, serve) -> None:
    worker = await stub()
    served = await serve(
        worker, **{"listen.api_keys": "sk-one,sk-two", "tenancy.unisolated": "allow"}
    )
    routes = [*app.GENERATE, *app.RELAYED, *app.READS - app.OPEN, "/v1/x", "/v1/models/m"]
    odd = ["//v1/chat/completions", "/V1/chat/completions", f"{CHAT}/", "/v1/%63hat/completions"]
    for route in [*routes, *odd, "/x/../v1/models", "/nothing"]:
        for method in ("GET", "POST", "OPTIONS", "PUT"):
            check_error(await ask(served.url, route, chat(), method=method), 401)
        wrong = ("Authorization", "Bearer sk-on")
        check_error(await ask(served.url, route, chat(), wrong), 401)
    for route in app.OPEN:
        assert (await ask(served.url, route)).status == 200
    assert worker.seen == []
    for key in (("Authorization", "Bearer sk-two"), ("x-api-key", "sk-one")):
        assert (await ask(served.url, CHAT, chat(), key)).status == 200
    for seen in worker.seen:
        assert b"sk-" not in seen.raw_head


SMUGGLED = b"GET /admin HTTP/1.1\r\nHost: g\r\n\r\n"
AMBIGUOUS = [
    b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n2;a\nb\r\n{}\r\n0\r\n\r\n",
    b"X-A: \x00\r\nContent-Length: 2\r\n\r\n{}",
]


@pytest.mark.parametrize("framing", AMBIGUOUS)
async def test_ambiguous_framing_is_refused(stub, serve, dial, framing) -> None:
    worker = await stub()
    served = await serve(worker)
    client = await dial(served.url)
    start = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n".encode()
    client.writer.write(start + framing + SMUGGLED)
    check_error(await client.read(), 400)
    assert await client.reader.read() == b""
    assert worker.seen == []


async def test_hop_by_hop_headers_end_here(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    body = json.dumps({"ok": 1}).encode()
    worker.plays(
        [
            head(
                200,
                ("Content-Type", "application/json"),
                ("Connection", "close, X-W"),
                ("X-W", "1"),
                ("X-Kept", "2"),
                ("Transfer-Encoding", "chunked"),
                ("Keep-Alive", "timeout=1"),
            )
            + chunk(body)
            + chunk(b"")
        ]
    )
    reply = await ask(
        served.url,
        CHAT,
        chat(),
        ("Connection", "keep-alive, X-Secret-Hop"),
        ("X-Secret-Hop", "1"),
        ("Keep-Alive", "x"),
        ("TE", "trailers"),
        ("Trailer", "x"),
        ("Proxy-Authorization", "y"),
        ("Authorization", "Bearer sk-mine"),
        ("Upgrade", "h2c"),
        ("Expect", "100-continue"),
        ("traceparent", "00-a-b-01"),
    )
    assert reply.status == 200
    for name in ("x-w", "keep-alive"):
        assert reply.header(name) is None
    assert reply.header("x-kept") == "2"
    seen = worker.seen[0]
    forbidden = (
        "x-secret-hop keep-alive te trailer proxy-authorization authorization upgrade expect"
    )
    for name in forbidden.split():
        assert seen.header(name) is None, name
    assert seen.values("host") == [worker.id]
    assert seen.header("traceparent") == "00-a-b-01"
    assert len(seen.values("content-length")) == 1
    assert seen.values("transfer-encoding") == []


async def test_equal_request_ids_do_not_mix(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.respond = lambda seen: stream(
        *[delta(seen.json["messages"][0]["content"])] * 3, gap_s=0.05
    )
    clients = [await dial(served.url) for _ in range(20)]
    for number, client in enumerate(clients):
        body = json.dumps(chat(f"t{number}", stream=True, request_id="same")).encode()
        await client.send("POST", CHAT, body, ("x-request-id", "same"))
    await eventually(lambda: len(worker.seen) == 20)
    for client in clients[:5]:
        client.close()
    replies = await asyncio.gather(*(client.read() for client in clients[5:]))
    assert [reply.text for reply in replies] == [f"t{n}" * 3 for n in range(5, 20)]
    assert {reply.header("x-request-id") for reply in replies} == {"same"}
    assert len({seen.header("x-request-id") for seen in worker.seen}) == 20
    odd = await ask(served.url, CHAT, chat(), ("x-request-id", "a b" * 100))
    assert odd.header("x-request-id").startswith("req-")


async def test_metric_series_are_bounded(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)

    async def series() -> int:
        body = (await ask(served.admin, "/metrics")).body.decode()
        return sum(not line.startswith("#") for line in body.splitlines())

    client = await dial(served.url)

    async def storm(first: int, last: int) -> None:
        for n in range(first, last):
            body = json.dumps({**chat(), "model": f"no-{n}", "user": f"u{n}"}).encode()
            assert (await client.ask("POST", CHAT, body)).status == 404
            assert (await client.ask("GET", f"/path-{n}")).status == 404
            await client.ask("POST", f"/v1/path-{n}", b'{"model": "x"}')
            assert (await ask(served.url, "/v1/models", method=f"M{n}")).status == 400

    await storm(0, 3)
    before = await series()
    await storm(3, 60)
    assert await series() - before <= 4


async def test_slow_heads_and_bodies_are_closed(stub, serve, dial, monkeypatch) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.5)
    monkeypatch.setattr(limits, "BODY_S", 0.5)
    worker = await stub()
    worker.plays(stream(*[delta("a")] * 10, gap_s=0.2))
    served = await serve(worker)
    slow_head = await dial(served.url)
    slow_head.writer.write(b"POST /v1/chat")
    slow_body = await dial(served.url)
    slow_body.writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000000\r\n\r\n{".encode()
    )
    long_answer = asyncio.create_task(ask(served.url, CHAT, chat(stream=True)))
    async with asyncio.timeout(20):
        assert await slow_head.reader.read() == b""
        check_error(await slow_body.read(), 408)
    reply = await long_answer
    assert (reply.complete, reply.text) == (True, "a" * 10)


async def test_one_log_line_per_request_and_no_prompt_in_it(stub, serve, log) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(completion(), answer({"error": {"message": "CANARY"}}, 500), completion())
    await ask(served.url, CHAT, chat("CANARY", user="CANARY"), ("Authorization", "Bearer CANARY"))
    await ask(served.url, f"{CHAT}?key=CANARY", chat("CANARY"))
    odd = 'x\n{"level":"x"}'
    await ask(served.url, CHAT, {**chat("CANARY"), "model": odd})
    await eventually(lambda: log.getvalue().count('"event":"request"') == 3)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert "CANARY" not in json.dumps(lines)
    told = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in told] == [200, 500, 404]
    assert (
        told[0].items()
        >= {
            "model": "m",
            "worker": worker.id,
            "outcome": "ok",
            "prompt_tokens": 7,
            "cached_tokens": 4,
            "output_tokens": 3,
        }.items()
    )
    assert told[2]["model"] == odd


async def test_health_stays_quick_while_long_prompts_are_read(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.respond = lambda seen: (
        stream(*[delta("a")] * 40, gap_s=0.02) if seen.json.get("stream") else completion()
    )
    watched = asyncio.create_task(ask(served.url, CHAT, chat(stream=True)))
    bodies = [json.dumps(chat(f"{n} " + "word " * 100_000)).encode() for n in range(8)]
    long = [asyncio.create_task(ask(served.url, CHAT, body)) for body in bodies]
    waits = []
    while not all(task.done() for task in long):
        begun = Stopwatch()
        assert (await ask(served.url, "/health")).status == 200
        waits.append(begun.seconds())
        await asyncio.sleep(0.02)
    assert max(waits) < 0.5
    assert (await watched).text == "a" * 40
    assert {reply.status for reply in await asyncio.gather(*long)} == {200}
