"""A12: content given as a list of parts, with templates written for text and for parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from caserig import check_error, sdk
from rig import CHAT, RawClient, ask

from shared.openai import RouteKind, parse
from shared.render import byte_bundle
from shared.template import ChatTemplate

PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
)


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    """Text parts."""
    return [{"type": kind, "text": text} for text in texts]


@pytest.fixture(params=["worker", "gateway"])
async def client(request, fake_worker, module_gateway, dial) -> RawClient:
    """A connection to the worker or to a gateway in front of it."""
    gateways = module_gateway.gateways
    gateway = gateways[0] if gateways else module_gateway(fake_worker.url)
    made: RawClient = await dial(fake_worker.url if request.param == "worker" else gateway.url)
    return made


async def answered(client: RawClient, *contents: Any, **more: Any) -> tuple[str, int]:
    """(text, prompt tokens) of a greedy answer to messages with these contents."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": each} for n, each in enumerate(contents)]
    body = {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 12, **more}
    reply = await client.ask("POST", CHAT, json.dumps(body).encode())
    assert reply.status == 200, reply.body
    if body.get("stream"):
        usage = json.loads(reply.events[-2])["usage"]
        return reply.text, usage["prompt_tokens"]
    return reply.json["choices"][0]["message"]["content"], reply.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        (parts("ab cd"), "ab cd"),
        (parts("ab cd", kind="input_text"), "ab cd"),
        (parts("ab cd", kind="output_text"), "ab cd"),
        ([{"text": "ab cd"}], "ab cd"),
        (["ab cd"], "ab cd"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        (parts("alpha", "beta"), "alpha\nbeta"),
        (parts("", "beta"), "\nbeta"),
        (parts("  a ", "\n", "b"), "  a \n\n\nb"),
        ([*parts("a"), "b", {"text": "c"}], "a\nb\nc"),
        (parts(""), ""),
        ([], ""),
        (None, ""),
        (parts("é🌍", "你"), "é🌍\n你"),
        ([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "x"),
    ],
)
async def test_parts_are_their_joined_text(client, listed, text) -> None:
    plain = await answered(client, text)
    assert await answered(client, listed) == plain
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    assert await answered(client, listed, **usage) == plain
    turns = await answered(client, "first", "said", text)
    assert await answered(client, parts("first"), parts("said"), listed) == turns


async def test_no_part_is_lost(client) -> None:
    both, one, other = [
        await answered(client, parts(*texts))
        for texts in (("alpha", "beta"), ("alpha",), ("beta",))
    ]
    assert both[1] > max(one[1], other[1])
    assert len({both[0], one[0], other[0]}) == 3
    many = [f"part {number}" for number in range(40)]
    whole = await answered(client, parts(*many))
    for left_out in (0, 17, 39):
        some = await answered(client, parts(*many[:left_out], *many[left_out + 1 :]))
        assert some[1] < whole[1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image_url", "image_url": "http://127.0.0.1:1/x.png"},
        {"type": "input_image", "image_url": "x"},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "image"},
        {"type": "nonsense", "text": "x"},
        {"type": "", "text": "x"},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_text_is_refused(client, part, stream) -> None:
    for content in ([part], [*parts("look"), part, *parts("there")]):
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": content},
        ]
        body = {"model": "fake", "messages": messages, "stream": stream, "max_tokens": 2}
        reply = await client.ask("POST", CHAT, json.dumps(body).encode())
        error = check_error(reply, 400)
        assert "messages[2]" in error["param"]
        assert "text" in error["message"]


def test_a_template_for_parts_gets_parts() -> None:
    """And one for text gets text, whatever the client sent."""
    from shared.chat import render

    for content in ("ab", parts("ab"), ["ab"]):
        body = {"messages": [{"role": "user", "content": content}]}
        request = parse(RouteKind.CHAT, json.dumps(body).encode())
        assert render(ChatTemplate(PARTS_TEMPLATE), request, {}) == "user:[ab]"
        text = render(ChatTemplate(byte_bundle().chat_template or ""), request, {})
        assert "\nab<" in text


async def test_the_real_client(fake_worker) -> None:
    async with sdk(fake_worker.url) as client:
        said = [
            await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
                temperature=0,
                max_tokens=8,
            )
            for content in ("ab cd", parts("ab cd"))
        ]
    assert said[0].choices[0].message.content == said[1].choices[0].message.content
    assert (await ask(fake_worker.url, "/health")).status == 200
