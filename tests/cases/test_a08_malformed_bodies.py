"""A08: bodies that are no JSON, no object, or of a wrong shape, at the worker and at the gateway.

Each is a 400 that says why, at once; the connection stays usable; no worker hears of what the
gateway itself can judge. Deep nesting, foreign encodings, halves of surrogate pairs, numbers that
fit nowhere and repeated members are in the list because parsers differ in them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from caserig import COMPLETIONS, check_error
from rig import CHAT, RawClient, Reply

SAID = b'"messages":[{"role":"user","content":"x"}]'
OPEN = b'{"model":"fake","max_tokens":1,' + SAID
LEGAL = OPEN + b"}"

NO_JSON = {
    "a bare word": b'{"model":"m",x}',
    "nothing": b"",
    "white space": b" \r\n\t",
    "cut off": LEGAL[:-1],
    "cut inside a string": LEGAL[:-6],
    "more behind it": LEGAL + b" x",
    "two objects": LEGAL + LEGAL,
    "a comma too many": OPEN + b",}",
    "a comment": OPEN + b"/* why */}",
    "single quotes": b"{'model':'m'}",
    "a control character": OPEN + b',"user":"a\nb"}',
    "NaN": OPEN + b',"temperature":NaN}',
    "Infinity": OPEN + b',"temperature":Infinity}',
    "minus Infinity": OPEN + b',"top_p":-Infinity}',
    "a number beyond floats": OPEN + b',"temperature":1e400}',
    "5000 digits": OPEN + b',"seed":' + b"9" * 5000 + b"}",
    "a leading zero": OPEN + b',"seed":07}',
    "a plus": OPEN + b',"seed":+7}',
    "10 000 lists": b"[" * 10_000,
    "10 000 objects": b'{"a":' * 10_000,
    "deep inside a field": OPEN + b',"metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep inside a message": LEGAL.replace(b'"x"', b'"x","y":' + b"[" * 9000 + b"]" * 9000),
    "half a pair": LEGAL.replace(b'"x"', rb'"\ud800"'),
    "half a pair amid text": LEGAL.replace(b'"x"', rb'"a\udc00b"'),
    "half a pair as a name": OPEN + rb',"\ud800":1}',
    "half a pair as bytes": LEGAL.replace(b"x", b"\xed\xa0\x80"),
    "no UTF-8": LEGAL.replace(b"x", b"\xe9"),
    "an overlong form": LEGAL.replace(b"x", b"\xc0\xaf"),
    "ff fe 7b": bytes.fromhex("fffe7b"),
    "UTF-16": LEGAL.decode().encode("utf-16"),
    "UTF-32": LEGAL.decode().encode("utf-32-le"),
    "a byte order mark": b"\xef\xbb\xbf" + LEGAL,
}
NO_OBJECT = {
    "a list": b"[]",
    "a text": b'"str"',
    "null": b"null",
    "a number": b"7",
    "true": b"true",
}


def message(**fields: Any) -> bytes:
    """A body with one message of these fields."""
    return json.dumps({"model": "fake", "messages": [fields]}).encode()


def field(text: str) -> bytes:
    """A good body and one more field, as JSON text."""
    return OPEN + b"," + text.encode() + b"}"


SHAPES: dict[str, bytes] = {
    "messages": b'{"model":"fake"}',
    "messages ": b'{"model":"fake","messages":null}',
    **{
        f"messages {value}": b'{"model":"fake","messages":' + value.encode() + b"}"
        for value in ('"hi"', "[]", "{}", "5", "true")
    },
    **{
        f"messages[0] {value}": b'{"model":"fake","messages":[' + value.encode() + b"]}"
        for value in ("null", "[]", '"hi"', "5")
    },
    "messages[0].role": message(content="x"),
    "messages[0].role 5": message(role=5, content="x"),
    "messages[0].role empty": message(role="", content="x"),
    "messages[0].content 5": message(role="user", content=5),
    "messages[0].content {}": message(role="user", content={}),
    "messages[0].content[0] 5": message(role="user", content=[5]),
    "messages[0].content[0].text": message(role="user", content=[{"type": "text"}]),
    "messages[0].content[0].text 5": message(role="user", content=[{"type": "text", "text": 5}]),
    "messages[0].content[0].type": message(role="user", content=[{"type": 5, "text": "x"}]),
    "messages[0].tool_calls": message(role="assistant", tool_calls=5),
    "messages[0].tool_calls [5]": message(role="assistant", tool_calls=[5]),
    "temperature": field('"temperature":"hot"'),
    "temperature true": field('"temperature":true'),
    "n 0": field('"n":0,"stream":true'),
    "n -1": field('"n":-1'),
    "n 1.5": field('"n":1.5'),
    "n true": field('"n":true'),
    "stream": field('"stream":"true"'),
    "stream_options": field('"stream_options":[]'),
    "stream_options.include_usage": field('"stream_options":{"include_usage":1}'),
    "max_tokens": field('"max_tokens":"5"'),
    "max_completion_tokens": field('"max_completion_tokens":[]'),
    "stop": field('"stop":5'),
    "stop [5]": field('"stop":["a",5]'),
    "tools": field('"tools":{}'),
    "tools [5]": field('"tools":[5]'),
    "response_format": field('"response_format":"json"'),
    "model": b'{"model":5,' + SAID + b"}",
    "model []": b'{"model":["fake"],' + SAID + b"}",
    "cache_salt": field('"cache_salt":5'),
    "user": field('"user":{}'),
}
"""By the field that the error must name (what follows a space only tells them apart)."""

ENGINE: dict[str, bytes] = {
    "max_tokens 0": field('"max_tokens":0'),
    "max_tokens huge": field(f'"max_tokens":{"9" * 30}'),
    "seed": field(f'"seed":{"9" * 400}'),
    "temperature": field('"temperature":-0.1'),
    "top_p": field('"top_p":1.1'),
    "logit_bias": field('"logit_bias":5'),
    "logit_bias key": field('"logit_bias":{"x":1}'),
    "logit_bias.1": field('"logit_bias":{"1":"x"}'),
    "logprobs": field('"logprobs":5'),
    "top_logprobs": field('"logprobs":true,"top_logprobs":21'),
    "stop empty": field('"stop":""'),
    "stop_token_ids": field('"stop_token_ids":[1.5]'),
    "tools names": field('"tools":[{"type":"function","function":5}]'),
    "tool_choice": field('"tool_choice":5'),
    "response_format": field('"response_format":{"type":[]}'),
    "n 129": field('"n":129'),
    "n huge": field(f'"n":{"9" * 30}'),
    "messages[0]": message(role="assistant", tool_calls=[{}]),
    "messages[0].tool_calls[0]": message(
        role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]
    ),
}
"""What only an engine can judge."""


async def refused(client: RawClient, body: bytes, path: str = CHAT) -> dict[str, Any]:
    """The error of a body, which must come before any time limit of ours is over."""
    async with asyncio.timeout(10):
        reply: Reply = await client.ask("POST", path, body)
    error = check_error(reply, 400, 422)
    assert error["type"] == "invalid_request_error"
    for leak in ("Traceback", "File \\", ".py"):
        assert leak not in reply.body.decode()
    return error


@pytest.fixture
async def served(serve, stub):
    """The gateway in front of a stub that has the worker's model."""
    return await serve(await stub(models=("fake",)))


@pytest.fixture(params=["worker", "gateway"])
async def place(request, fake_worker, served, dial):
    """A connection to either; behind the gateway no worker hears of a refused request."""
    if request.param == "worker":
        yield await dial(fake_worker.url)
        return
    yield await dial(served.url)
    assert [seen for seen in served.stubs[0].seen if seen.body != LEGAL] == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_no_json_object(place, path) -> None:
    for name, body in {**NO_JSON, **NO_OBJECT}.items():
        error = await refused(place, body, path)
        assert "body" in error["message"], name
        assert error["param"] is None
    assert (await place.ask("POST", CHAT, LEGAL)).status == 200


async def test_wrong_shapes_name_the_field(place) -> None:
    for name, body in SHAPES.items():
        assert (await refused(place, body))["param"] == name.split(" ")[0], name
    assert (await place.ask("POST", CHAT, LEGAL)).status == 200


async def test_what_the_engine_refuses(fake_worker, dial) -> None:
    client = await dial(fake_worker.url)
    for name, body in ENGINE.items():
        for stream in (b"false", b"true"):
            sent = body.replace(b"{", b'{"stream":' + stream + b",", 1)
            assert (await refused(client, sent))["param"] == name.split(" ")[0], name
    assert (await client.ask("POST", CHAT, LEGAL)).status == 200


@pytest.mark.parametrize(
    "prompt",
    [
        "null",
        "5",
        "{}",
        "true",
        "[]",
        "[[]]",
        "[null]",
        '["a",1]',
        "[-1]",
        "[1.0]",
        "[true]",
        "[[[1]]]",
        "[4294967296]",
        f"[{'9' * 30}]",
        rf'"{chr(92)}ud800"',
        '["a",["b"]]',
    ],
)
async def test_prompts(place, prompt) -> None:
    body = b'{"model":"fake","max_tokens":1,"prompt":' + prompt.encode() + b"}"
    error = await refused(place, body, COMPLETIONS)
    assert error["param"] == (None if "ud800" in prompt else "prompt")


@pytest.mark.parametrize("where", ["worker", "gateway"])
async def test_odd_but_legal(where, fake_worker, served, dial) -> None:
    """White space, escapes, whole pairs, other scripts, nested metadata; the last of two counts."""
    client = await dial(fake_worker.url if where == "worker" else served.url)
    nested = b'"metadata":{"a":' + b"[" * 200 + b"]" * 200 + b"}"
    twice = b'{"model":"nobody","max_tokens":"x","n":0,"messages":[],' + LEGAL[1:-1] + b',"n":1}'
    for body in (
        b" \n" + LEGAL + b"\r\n ",
        LEGAL.replace(b'"x"', rb'"\ud83c\udf0d\u0000\/"'),
        LEGAL.replace(b'"x"', '"é🌍\u2028\ufeff"'.encode()),
        OPEN + b"," + nested + b',"never heard of":[1,2]}',
        OPEN + b',"seed":-0,"temperature":0e0,"top_p":1E-2}',
        twice,
    ):
        assert (await client.ask("POST", CHAT, body)).status == 200, body


async def test_requests_that_are_no_http(fake_worker, served) -> None:
    """They never reach a handler: the answer is JSON all the same, and quotes nothing."""
    for url in (fake_worker.url, fake_worker.admin_url, served.url, served.admin):
        for lines in (
            "garbage",
            "POST / HTTP/1.1\r\nContent-Length: x",
            "GET / HTTP/1.1\r\nAuthorization: Bearer CANARY\x00",
            "GET / HTTP/1.1\r\nAuthorization : Bearer CANARY",
            "GET / HTTP/1.1\r\nContent-Type: CANARY\r\nContent-Type: CANARY",
            "GET / HTTP/1.1\r\nX: " + "CANARY" * 10_000,
            "POST / HTTP/1.1\r\nTransfer-Encoding: CANARY\r\nContent-Length: 4",
        ):
            client = await RawClient.connect(url)
            client.writer.write(f"{lines}\r\n\r\n".encode())
            async with asyncio.timeout(20):
                reply = await client.read()
            client.close()
            check_error(reply, 400)
            assert b"CANARY" not in reply.body
    assert "CANARY" not in fake_worker.stderr.read_text()
