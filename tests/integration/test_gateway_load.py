"""Load accounting, cancellation and retries (cases A16, B03, B04, B05, B10-B13, B20, B21)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import pytest
from rig import (
    CHAT,
    CUT,
    DONE,
    END,
    HANG,
    ROLE,
    SSE_HEAD,
    STOP,
    answer,
    ask,
    chat,
    chunk,
    completion,
    cut_stream,
    delta,
    eventually,
    plain,
    raw_stream,
    stream,
)
from stopwatch import Stopwatch


def slow(seconds: float = 60.0, gap_s: float = 0.05) -> list:
    """A delta each ``gap_s`` for a long time."""
    return [SSE_HEAD, chunk(ROLE), *[chunk(delta("x")), gap_s] * int(seconds / gap_s)]


async def reads(client, deltas: int) -> None:
    """Read that many chunks of a stream."""
    await client.reader.readuntil(b"\r\n\r\n")
    pieces = client.chunks()
    for _ in range(deltas):
        await anext(pieces)


async def test_a_client_that_leaves_frees_the_worker_at_once(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(slow())
    for _ in range(20):
        client = await dial(served.url)
        await client.send("POST", CHAT, json.dumps(chat(stream=True)).encode())
        await reads(client, 2)
        left = Stopwatch()
        client.close()
        seen = worker.seen[-1]
        await eventually(lambda seen=seen: seen.closed_at is not None)
        assert left.seconds() < 1.0
        assert served.inflight() == 0
    # What is still open are the few that probes of several paths keep.
    await eventually(lambda: worker.open_connections <= 12)


@pytest.mark.parametrize("body", [chat(), chat(stream=True)])
async def test_a_client_that_leaves_before_the_head_frees_the_worker(
    stub, serve, dial, body
) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays([HANG])
    client = await dial(served.url)
    await client.send("POST", CHAT, json.dumps(body).encode())
    await eventually(lambda: worker.seen)
    assert served.inflight() == 1
    client.close()
    await eventually(lambda: worker.seen[0].closed_at is not None, 1.0)
    assert served.inflight() == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_load_counts_from_the_choice_on(stub, serve, dial, path, streamed) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays([HANG])
    for n in range(40):
        body = chat(f"{n} different {n * 7919}", stream=streamed)
        if path != CHAT:
            body = {"model": "m", "prompt": f"{n} different {n * 7919}", "stream": streamed}
        client = await dial(served.url)
        await client.send("POST", path, json.dumps(body).encode())
    await eventually(lambda: sum(len(w.seen) for w in workers) == 40)
    assert all(7 <= len(w.seen) <= 13 for w in workers), [len(w.seen) for w in workers]


async def test_ties_are_spread(stub, serve) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for n in range(8):
        assert (await ask(served.url, CHAT, chat(f"{n} unlike the others {n * 31}"))).status == 200
    assert max(len(w.seen) for w in workers) < 8


async def test_aborts_at_any_moment_leave_no_load(stub, serve, dial) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    rng = random.Random(4)

    def respond(seen):
        return rng.choice([[0.05, *slow(2.0, 0.01)], slow(2.0, 0.01), plain(b"x", 500), [HANG]])

    for worker in workers:
        worker.respond = respond

    async def one() -> None:
        client = await dial(served.url)
        body = json.dumps(chat(f"{rng.random()}", stream=rng.random() < 0.7)).encode()
        await client.send("POST", CHAT, body)
        await asyncio.sleep(rng.random() * 0.15)
        client.abort()

    for _ in range(6):
        await asyncio.gather(*(one() for _ in range(50)))
    await eventually(lambda: served.inflight() == 0, 2.0)
    metrics = (await ask(served.admin, "/metrics")).body.decode()
    gauges = [line for line in metrics.splitlines() if line.startswith("headwater_inflight{")]
    assert len(gauges) == 4
    assert all(line.endswith(" 0.0") for line in gauges)
    for worker in workers:
        worker.respond = None
        await eventually(lambda w=worker: w.open_connections <= 110)


async def test_a_flapping_worker_never_counts_below_zero(stub, serve) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    first = workers[0]
    router = served.gateway.router
    lowest = []

    def inflight_of_first() -> int:
        now = time.monotonic()
        value = next(w.inflight for w in router.workers(now) if w.id == first.id)
        lowest.append(value)
        return value

    let_go = asyncio.Event()
    for worker in workers:
        worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), let_go, chunk(STOP + DONE), END])
    running = [
        asyncio.create_task(ask(served.url, CHAT, chat(f"{n} one {n * 31}", stream=True)))
        for n in range(40)
    ]
    await eventually(lambda: sum(len(w.seen) for w in workers) == 40)
    assert inflight_of_first() > 0
    first.healthy = False
    await eventually(lambda: any(w.reason for w in router.workers(time.monotonic())))
    first.healthy = True
    await eventually(lambda: not any(w.reason for w in router.workers(time.monotonic())))
    let_go.set()
    replies = await asyncio.gather(*running)
    assert all(reply.events[-1] == "[DONE]" for reply in replies)
    assert inflight_of_first() == 0
    assert min(lowest) >= 0
    before = [len(w.seen) for w in workers]
    for worker in workers:
        worker.plays([0.3, *completion()])
    await asyncio.gather(*(ask(served.url, CHAT, chat(f"{n} two {n * 77}")) for n in range(40)))
    shares = [len(w.seen) - b for w, b in zip(workers, before, strict=True)]
    assert all(7 <= share <= 13 for share in shares), shares


async def test_nothing_is_retried_after_content(stub, serve) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two)
    for worker in (one, two):
        worker.plays(cut_stream(ROLE, delta("one "), delta("two "), delta("three")))
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert len(one.seen) + len(two.seen) == 1
    assert "error" in json.loads(reply.events[-1])
    assert (
        "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in reply.events[:-1])
        == "one two three"
    )


DEAD = {
    "cut before the head": [0.01, CUT],
    "cut after the role": cut_stream(ROLE),
    "ended without content": raw_stream(ROLE),
    "500": plain(b"no", 500),
    "503 json": answer({"error": {"message": "busy"}}, 503),
    "an error event": raw_stream(ROLE, b'data: {"error":{"message":"boom"}}\n\n'),
    "no http": [b"hello\r\n\r\n", CUT],
}


@pytest.mark.parametrize("how", DEAD)
async def test_a_worker_that_dies_before_content_is_replaced(stub, serve, how) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two, **{"routing.policy": "round_robin"})
    for _ in range(2):
        one.plays(DEAD[how])
        two.plays(stream(delta("good")))
        reply = await ask(served.url, CHAT, chat(stream=True))
        assert reply.status == 200, reply.body
        assert reply.body == ROLE + delta("good") + STOP + DONE
    assert len(one.seen) >= 1
    assert reply.header("x-headwater-worker") == two.id
    assert served.inflight() == 0


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_refusals_pass_and_trip_nothing(stub, serve, status) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two)
    for worker in (one, two):
        worker.plays(
            answer({"error": {"message": "no", "type": "t"}}, status, ("Retry-After", "7"))
        )
    for n in range(20):
        reply = await ask(served.url, CHAT, chat(f"{n}"))
        assert reply.status == status
        assert reply.header("retry-after") == "7"
    assert len(one.seen) + len(two.seen) == 20
    for worker in (one, two):
        worker.plays(completion())
    assert (await ask(served.url, CHAT, chat())).status == 200
    assert not any(w.reason for w in served.gateway.router.workers(time.monotonic()))


async def test_a_failing_worker_rests_and_a_failing_fleet_is_still_tried(stub, serve) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two)
    one.plays(plain(b"no", 500))
    for n in range(50):
        assert (await ask(served.url, CHAT, chat(f"{n} a {n * 31}"))).status == 200
    assert len(one.seen) < 20
    two.plays(plain(b"no", 500))
    for n in range(20):
        assert (await ask(served.url, CHAT, chat(f"{n} b {n * 31}"))).status == 500
    before = len(one.seen) + len(two.seen)
    assert (await ask(served.url, CHAT, chat("once more"))).status == 500
    assert len(one.seen) + len(two.seen) > before


@pytest.mark.parametrize(
    ("script", "status"), [(plain(b"no", 503), 503), ([CUT], 502)], ids=["503", "reset"]
)
async def test_a_total_outage_is_not_amplified(stub, serve, script, status) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays(script)

    async def burst(n: int) -> Counter:
        replies = await asyncio.gather(
            *(ask(served.url, CHAT, chat(f"{i} {random.random()}")) for i in range(n))
        )
        return Counter(reply.status for reply in replies)

    attempts = 0
    for round_number in range(8):
        assert await burst(25) == {status: 25}
        now = sum(len(w.seen) for w in workers)
        last, attempts = now - attempts, now
        assert last <= 75, round_number
    assert attempts <= 600
    assert last <= 25 * 1.2


async def test_black_holes_fail_over_and_are_left_alone(stub, serve) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two)
    await one.stop()
    begun = Stopwatch()
    for n in range(10):
        assert (await ask(served.url, CHAT, chat(f"{n} {n * 31}"))).status == 200
    assert begun.seconds() < 5.0
    await two.stop()
    begun = Stopwatch()
    reply = await ask(served.url, CHAT, chat("x"))
    assert reply.status == 503
    assert reply.json["error"]["code"] == "no_capacity"
    assert reply.header("retry-after")
    assert begun.seconds() < 5.0
    await eventually(lambda: not served.gateway.router.ready()[0])
    ready = await ask(served.url, "/ready")
    assert ready.status == 503
    assert ready.json["reasons"]
    await two.listen()
    await eventually(lambda: served.gateway.router.ready()[0])
    assert (await ask(served.url, CHAT, chat("y"))).status == 200


@pytest.mark.parametrize("how", ["after each answer", "when idle"])
async def test_connections_closed_by_the_worker_cost_nothing(stub, serve, how) -> None:
    worker = await stub()
    worker.close_after_answer = how == "after each answer"
    worker.close_idle_s = 0.02 if how == "when idle" else None
    served = await serve(worker)
    rng = random.Random(1)
    for n in range(100):
        assert (await ask(served.url, CHAT, chat(f"{n}"))).status == 200
        await asyncio.sleep(0.02 + rng.uniform(-0.003, 0.003))
    assert len(worker.seen) == 100


async def test_many_streams_to_one_worker_run_at_once(stub, serve, dial) -> None:
    worker = await stub()
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), HANG])
    served = await serve(worker)
    clients = [await dial(served.url) for _ in range(150)]
    for client in clients:
        await client.send("POST", CHAT, json.dumps(chat(stream=True)).encode())
    # None of them ends: whoever waited for another one would wait for ever.
    async with asyncio.timeout(60):
        await asyncio.gather(*(reads(client, 1) for client in clients))
    assert served.inflight() == 150


async def test_silence_is_cut_and_slow_talk_is_not(stub, serve) -> None:
    silent, talker = await stub(("silent",)), await stub(("talker",))
    served = await serve(silent, talker, **{"workers.idle_timeout_s": 1.0})
    silent.plays([SSE_HEAD, chunk(ROLE + delta("a")), HANG])
    talker.plays(stream(*[delta("a")] * 12, gap_s=0.1))
    quiet = await ask(served.url, CHAT, {**chat(stream=True), "model": "silent"})
    assert "error" in json.loads(quiet.events[-1])
    chatty = await ask(served.url, CHAT, {**chat(stream=True), "model": "talker"})
    assert (chatty.text, chatty.events[-1]) == ("a" * 12, "[DONE]")
    silent.plays([HANG])
    late = await ask(served.url, CHAT, {**chat(), "model": "silent"})
    assert late.status == 504


async def test_a_client_can_shorten_its_own_deadline(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays([HANG], [SSE_HEAD, chunk(ROLE + delta("a")), HANG])
    early = await ask(served.url, CHAT, chat(), ("x-headwater-timeout", "0.2"))
    assert early.status == 504
    assert early.json["error"]["code"] == "deadline_exceeded"
    late = await ask(served.url, CHAT, chat(stream=True), ("x-headwater-timeout", "2"))
    assert late.status == 200
    assert json.loads(late.events[-1])["error"]["code"] == "deadline_exceeded"
    assert served.inflight() == 0


NO_NUMBERS = ("soon", "", "1_0", "\u0663".encode().decode("latin-1"), "0x10", "1e", "--1", "1 0")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "x-headwater-timeout",
            (*NO_NUMBERS, "0", "-1", "inf", "nan", "1e999", "-1e9"),
        ),
        ("x-headwater-priority", (*NO_NUMBERS, "1.0", "inf", f"{2**31}", f"-{2**40}", "9" * 5000)),
    ],
)
async def test_headers_that_hold_no_such_number(
    stub, serve, name: str, values: tuple[str, ...]
) -> None:
    """What Python would read as a number is none in HTTP."""
    worker = await stub()
    served = await serve(worker)
    for value in values:
        wrong = await ask(served.url, CHAT, chat(), (name, value))
        assert wrong.status == 400, value[:20]
        assert wrong.json["error"]["param"] == name
        assert len(wrong.body) < 300
    for value in ("7", "+7", f"{2**31 - 1}"):
        assert (await ask(served.url, CHAT, chat(), (name, value))).status == 200
    assert len(worker.seen) == 3
