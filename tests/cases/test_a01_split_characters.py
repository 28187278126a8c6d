"""A01: a character cut by the network in a relayed stream.

Scaled: the pause at a single cut is 1 ms instead of 5 ms; the byte-by-byte stream keeps its 5 ms.
"""

from __future__ import annotations

import json

import pytest
from caserig import COMPLETIONS, body_for, contents, piece, sdk
from rig import (
    CHAT,
    CLOSE,
    DONE,
    END,
    SSE_HEAD,
    STOP,
    ask,
    chat,
    chunk,
    completion,
    event,
    head,
)

TEXT = "你好🌍é"
BARE = 'data: {"choices":[{"index":0,"delta":{"content":"你好🌍é"}}]}\n\n'.encode()
UNFRAMED = head(200, ("Content-Type", "text/event-stream"), ("Connection", "close"))
OTHERS = {
    "joined family": "👩‍👩‍👧‍👦 family",
    "combining marks": "e\u0301 n\u0303 \u0926\u0947\u0935",
    "right to left": "שלום עליכם",
    "four bytes each": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎",
    "separators": "a\u2028b\u2029c\u0085d\ufeff",
    "escapes": 'tab\t quote" slash\\ null\u0000',
}


def strictly(reply, text: str) -> None:
    """Exactly this text, once, in whole valid events."""
    assert (reply.status, reply.complete) == (200, True), reply.body
    assert "\ufffd" not in reply.body.decode()
    raw_events = reply.body.split(b"\n\n")
    assert raw_events.pop() == b""
    assert all(each.startswith(b"data:") and b"\n" not in each for each in raw_events)
    data = [each.removeprefix(b"data:").strip() for each in raw_events]
    assert data[-1] == b"[DONE]"
    decoded = [json.loads(each) for each in data[:-1]]
    assert "".join(contents(decoded)) == text
    assert len(contents(decoded)) == 1
    ends = [c["finish_reason"] for e in decoded for c in e["choices"] if c.get("finish_reason")]
    assert ends == ["stop"]


async def test_one_byte_at_a_time(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    script: list = [SSE_HEAD]
    for at in range(len(BARE)):
        script += [chunk(BARE[at : at + 1]), 0.005]
    worker.plays([*script, chunk(STOP), chunk(DONE), END])
    strictly(await ask(served.url, CHAT, chat(stream=True)), TEXT)


@pytest.mark.parametrize("framing", ["chunks", "one chunk in pieces", "until closed"])
async def test_cut_at_every_byte(stub, serve, framing) -> None:
    worker = await stub()
    served = await serve(worker)
    data = BARE + STOP + DONE
    for at in range(1, len(data), 1 if framing == "chunks" else 3):
        first, second = data[:at], data[at:]
        if framing == "chunks":
            worker.plays([SSE_HEAD, chunk(first), 0.001, chunk(second), END])
        elif framing == "one chunk in pieces":
            whole = chunk(data)
            worker.plays([SSE_HEAD, whole[: at + 3], 0.001, whole[at + 3 :] + END])
        else:
            worker.plays([UNFRAMED, first, 0.001, second, 0.001, CLOSE])
        strictly(await ask(served.url, CHAT, chat(stream=True)), TEXT)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("kind", OTHERS)
async def test_other_characters_bytewise(stub, serve, path, kind) -> None:
    worker = await stub()
    served = await serve(worker)
    data = event(piece(path, OTHERS[kind])) + event(piece(path, finish="stop")) + DONE
    worker.plays([SSE_HEAD, *[x for b in data for x in (chunk(bytes([b])), 0.0005)], END])
    strictly(await ask(served.url, path, body_for(path, stream=True)), OTHERS[kind])


async def test_escaped_pairs_pass_as_they_are(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    data = rb'data: {"choices":[{"index":0,"delta":{"content":"\u4f60\u597d\ud83c\udf0d\u00e9"}}]}'
    data += b"\n\n" + STOP + DONE
    for at in range(1, len(data), 3):
        worker.plays([SSE_HEAD, chunk(data[:at]), 0.001, chunk(data[at:]), END])
        reply = await ask(served.url, CHAT, chat(stream=True))
        strictly(reply, TEXT)
        assert reply.body == data


async def test_tool_arguments_and_reasoning(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": TEXT}}
    data = event(piece(CHAT, reasoning_content=TEXT)) + event(piece(CHAT, tool_calls=[call]))
    end = event(piece(CHAT, finish="tool_calls")) + DONE
    pieces = [x for b in data for x in (chunk(bytes([b])), 0.0005)]
    worker.plays([SSE_HEAD, *pieces, chunk(end), END])
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert reply.body == data + end


async def test_the_sdk_reads_it(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    cut = BARE.index("🌍".encode()) + 2
    worker.plays([SSE_HEAD, chunk(BARE[:cut]), 0.02, chunk(BARE[cut:] + STOP + DONE), END])
    async with sdk(served.url) as client:
        chunks = await client.chat.completions.create(**chat(stream=True))
        texts = [part.choices[0].delta.content async for part in chunks]
    assert "".join(text or "" for text in texts) == TEXT


async def test_whole_answers_and_errors_cut_inside_a_character(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    answer, refusal = completion(TEXT)[0], '{"error":{"message":"你好🌍é","type":"t"}}'.encode()
    assert isinstance(answer, bytes)
    for at in range(len(answer) - 200, len(answer), 3):
        worker.plays([answer[:at], 0.0005, answer[at:]])
        reply = await ask(served.url, CHAT, chat())
        assert reply.json["choices"][0]["message"]["content"] == TEXT
    start = head(400, ("Content-Type", "application/json"), ("Content-Length", str(len(refusal))))
    for at in range(1, len(refusal)):
        worker.plays([start + refusal[:at], 0.0005, refusal[at:]])
        reply = await ask(served.url, CHAT, chat(stream=True))
        assert (reply.status, reply.json["error"]["message"]) == (400, TEXT)
