"""B11: nothing is begun anew once a part of the answer has been sent; before that it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, contents, counts, first_then, inflight, piece
from rig import (
    CHAT,
    CLOSE,
    CUT,
    DONE,
    HANG,
    ROLE,
    SSE_HEAD,
    answer,
    ask,
    chat,
    chunk,
    completion,
    cut_stream,
    delta,
    event,
    head,
    plain,
    raw_stream,
)

SAID = [delta("one "), delta("two "), delta("three")]
TAIL = {"error": {"message": "boom", "type": "server_error"}}
AFTER_CONTENT: dict[str, list[Any]] = {
    "reset": cut_stream(ROLE, *SAID, how=CUT),
    "closed": cut_stream(ROLE, *SAID, how=CLOSE),
    "ended": raw_stream(ROLE, *SAID),
    "error event": raw_stream(ROLE, *SAID, event(TAIL)),
    "503 in the stream": raw_stream(ROLE, *SAID, event({"error": {**TAIL["error"], "code": 503}})),
    "cut in an event": cut_stream(ROLE, *SAID, delta("four")[:50]),
    "silence": [SSE_HEAD, chunk(ROLE), *map(chunk, SAID), HANG],
    "broken framing": [SSE_HEAD, chunk(ROLE), *map(chunk, SAID), 0.02, b"zz\r\n", HANG],
}

GOOD_ROLE = delta(role="assistant").replace(b'"c-1"', b'"good"')
GOOD = [
    GOOD_ROLE,
    *(delta(text).replace(b'"c-1"', b'"good"') for text in ("one ", "two")),
    delta(finish="stop").replace(b'"c-1"', b'"good"'),
    DONE,
]
EMPTY_ROLE = delta("", role="assistant")
BEFORE_CONTENT: dict[str, list[Any]] = {
    "no answer": [0.01, CUT],
    "closed without answer": [0.01, CLOSE],
    "half a head": [b"HTTP/1.1 200 OK\r\nContent-T", 0.01, CUT],
    "no HTTP": [b"SSH-2.0-x\r\n\r\n", 0.01, CLOSE],
    "head only": cut_stream(),
    "role": cut_stream(ROLE),
    "role, ended": raw_stream(ROLE),
    "role with empty content": cut_stream(EMPTY_ROLE),
    "role with nulls": cut_stream(delta(role="assistant", content=None, refusal=None)),
    "comments": cut_stream(b": ping\n\n", b": ping\n\n"),
    "role and comments": cut_stream(ROLE, b": ping\n\n", b"retry: 100\n\n"),
    "a part of the first content": cut_stream(ROLE, SAID[0][:-20]),
    "usage": cut_stream(event({"id": "c-1", "choices": [], "usage": None}), ROLE),
    "error event": raw_stream(ROLE, event(TAIL)),
    "nothing but the end of the body": raw_stream(),
    "500": plain(b"no", 500),
    "502 html": plain(b"<html>", 502, ("Content-Type", "text/html")),
    "503": answer(TAIL, 503),
    "json error": answer(TAIL),
    "silence": [SSE_HEAD, chunk(ROLE), HANG],
    "silence from the start": [HANG],
    "broken framing": [SSE_HEAD, chunk(ROLE), 0.02, b"zz\r\n", HANG],
}
QUICK = {"workers.idle_timeout_s": 1.0}


@pytest.mark.parametrize("how", AFTER_CONTENT)
async def test_after_content_the_error_is_told_and_nobody_else_is_asked(stub, serve, how) -> None:
    workers = [await stub() for _ in range(2)]
    served = await serve(*workers, **QUICK)
    respond = first_then(AFTER_CONTENT[how], raw_stream(*GOOD))
    for worker in workers:
        worker.respond = respond
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert (reply.status, reply.complete) == (200, True)
    *chunks, last = [json.loads(each) for each in reply.events]
    assert contents(chunks) == ["one ", "two ", "three"]
    assert set(last) == {"error"}
    assert b"[DONE]" not in reply.body
    assert {each["id"] for each in chunks} == {"c-1"}
    assert sorted(counts(workers)) == [0, 1]
    assert reply.header("x-headwater-attempts") == "1"
    assert sum((await inflight(served.admin)).values()) == 0


@pytest.mark.parametrize("how", BEFORE_CONTENT)
async def test_before_content_another_worker_is_tried(stub, serve, how) -> None:
    workers = [await stub() for _ in range(2)]
    served = await serve(*workers, **QUICK)
    respond = first_then(BEFORE_CONTENT[how], raw_stream(*GOOD))
    for worker in workers:
        worker.respond = respond
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert reply.status == 200, reply.body
    assert reply.body == b"".join(GOOD)
    assert counts(workers) == [1, 1]
    first, second = sorted(workers, key=lambda worker: worker.seen[0].at)
    assert reply.header("x-headwater-worker") == second.id
    assert reply.header("x-headwater-attempts") == "2"
    assert first.seen[0].body == second.seen[0].body
    assert sum((await inflight(served.admin)).values()) == 0


@pytest.mark.parametrize("how", ["reset", "ended", "error event"])
async def test_text_completions_too(stub, serve, how) -> None:
    workers = [await stub() for _ in range(2)]
    served = await serve(*workers)
    said = [event(piece(COMPLETIONS, text)) for text in ("one ", "two ", "three")]
    scripts = {
        "reset": cut_stream(*said),
        "ended": raw_stream(*said),
        "error event": raw_stream(*said, event(TAIL)),
    }
    respond = first_then(scripts[how], raw_stream(event(piece(COMPLETIONS, "no")), DONE))
    for worker in workers:
        worker.respond = respond
    reply = await ask(served.url, COMPLETIONS, body_for(COMPLETIONS, stream=True))
    *chunks, last = [json.loads(each) for each in reply.events]
    assert contents(chunks) == ["one ", "two ", "three"]
    assert set(last) == {"error"}
    assert sorted(counts(workers)) == [0, 1]


FIRST_SIGNS = {
    "tool call": delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f"}}]),
    "reasoning": delta(reasoning_content="hm"),
    "reasoning, short name": delta(reasoning="hm"),
    "white space": delta("\n"),
    "refusal": delta(refusal="I cannot"),
    "second choice": delta("x", index=1),
}


@pytest.mark.parametrize("kind", FIRST_SIGNS)
async def test_any_content_counts_as_a_part(stub, serve, kind) -> None:
    workers = [await stub() for _ in range(2)]
    served = await serve(*workers)
    respond = first_then(cut_stream(ROLE, FIRST_SIGNS[kind]), raw_stream(*GOOD))
    for worker in workers:
        worker.respond = respond
    reply = await ask(served.url, CHAT, chat(stream=True, n=2))
    assert reply.body.startswith(ROLE + FIRST_SIGNS[kind])
    assert set(json.loads(reply.events[-1])) == {"error"}
    assert sorted(counts(workers)) == [0, 1]


WHOLE_FAILURES: dict[str, list[Any]] = {
    "half an answer": [
        head(200, ("Content-Type", "application/json"), ("Content-Length", "500")) + b'{"id":',
        0.01,
        CUT,
    ],
    "no answer": [0.01, CUT],
    "500": plain(b"no", 500),
    "json error": answer(TAIL),
}


@pytest.mark.parametrize("how", WHOLE_FAILURES)
async def test_a_whole_answer_is_asked_for_again_while_no_byte_was_sent(stub, serve, how) -> None:
    workers = [await stub() for _ in range(2)]
    served = await serve(*workers)
    respond = first_then(WHOLE_FAILURES[how], completion("good"))
    for worker in workers:
        worker.respond = respond
    reply = await ask(served.url, CHAT, chat())
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"] == "good"
    assert counts(workers) == [1, 1]


async def test_many_streams_die_with_one_worker(stub, serve) -> None:
    """Each client has either a whole answer of one worker or a part of one, never a mixture."""
    workers = [await stub(), await stub()]
    served = await serve(*workers)
    for name, worker in zip("xy", workers, strict=True):
        texts = [delta(f"{name}{n} ") for n in range(5)]
        worker.plays(
            raw_stream(
                ROLE, *[x for text in texts for x in (text, 0.1)], delta(finish="stop"), DONE
            )
        )
    running = [
        asyncio.create_task(ask(served.url, CHAT, chat(f"{n} {n * 31}", stream=True)))
        for n in range(30)
    ]
    await asyncio.sleep(0.25)
    await workers[0].stop()
    whole = {"".join(f"{name}{n} " for n in range(5)) for name in "xy"}
    for reply in await asyncio.gather(*running):
        assert (reply.status, reply.complete) == (200, True)
        *chunks, last = reply.events
        text = "".join(contents([json.loads(each) for each in chunks if each != "[DONE]"]))
        if last == "[DONE]":
            assert text in whole
        else:
            assert "error" in json.loads(last)
            assert any(each.startswith(text) for each in whole)
            assert text.count("x0") == 1
