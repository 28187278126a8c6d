"""A13: assistant and tool messages without content, and tool calls in odd but usual forms.

With four templates: one without tools, one that shows calls, one that walks through arguments as an
object, and one that joins content as text without looking.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import jinja2
import pytest
from caserig import check_error, sdk
from rig import CHAT, RawClient

from shared.chat import render
from shared.errors import BadRequest
from shared.openai import RouteKind, parse
from shared.render import byte_bundle
from shared.template import ChatTemplate

LEFT_OUT = object()
CONTENTS = [LEFT_OUT, None, "", [], [{"type": "text", "text": ""}], "text"]
ARGUMENTS = ["{}", "null", "", "  ", '{"a": 1}', '{"a": {"b": [1]}}', {}, {"a": 1}, None]
ARGUMENTS += [LEFT_OUT]

TEMPLATES = {
    "chatml": byte_bundle().chat_template or "",
    "calls": (
        "{% for m in messages %}{{ m.role }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endif %}"
        "{{ m.content }}{% endfor %}"
    ),
    "items": (
        "{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    ),
    "trim": (
        "{% for m in messages %}{{ m['content'] | trim }}"
        "{% if 'tool_calls' in m %}{{ m['tool_calls'] | length }}{% endif %}{% endfor %}"
    ),
}


def histories() -> list[tuple[str, list[dict[str, Any]]]]:
    """Conversations with an assistant message of each form in the middle."""
    made = []
    for content, arguments in itertools.product(CONTENTS, ARGUMENTS):
        function = {"name": "f"} if arguments is LEFT_OUT else {"name": "f", "arguments": arguments}
        call = {"id": "c1", "type": "function", "function": function}
        for calls in ([call], [call, {**call, "id": "c2"}]):
            said: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
            if content is not LEFT_OUT:
                said["content"] = content
            results = [
                {"role": "tool", "tool_call_id": each["id"], "content": "7"} for each in calls
            ]
            made.append((f"{content} {arguments} {len(calls)}", [said, *results]))
    for content, calls in itertools.product(CONTENTS, ([], None, LEFT_OUT)):
        said = {"role": "assistant"}
        said |= {} if calls is LEFT_OUT else {"tool_calls": calls}
        said |= {} if content is LEFT_OUT else {"content": content}
        made.append((f"{content} without calls", [said]))
    for content in CONTENTS:
        result: dict[str, Any] = {"role": "tool", "tool_call_id": "c1"}
        result |= {} if content is LEFT_OUT else {"content": content}
        made.append((f"result {content}", [result]))
    user = {"role": "user", "content": "A"}
    return [(name, [user, *middle, {**user, "content": "B"}]) for name, middle in made]


def body(messages: list[dict[str, Any]], **more: Any) -> bytes:
    """A request."""
    fixed = {"model": "fake", "temperature": 0, "max_tokens": 2}
    return json.dumps({"messages": messages, **fixed, **more}).encode()


@pytest.fixture(params=["worker", "gateway"])
async def client(request, fake_worker, module_gateway, dial) -> RawClient:
    """A connection to the worker or to a gateway in front of it."""
    gateways = module_gateway.gateways
    gateway = gateways[0] if gateways else module_gateway(fake_worker.url)
    made: RawClient = await dial(fake_worker.url if request.param == "worker" else gateway.url)
    return made


async def test_every_history_is_answered(client) -> None:
    for number, (name, messages) in enumerate(histories()):
        stream = number % 2 == 1
        reply = await client.ask("POST", CHAT, body(messages, stream=stream))
        assert reply.status == 200, (name, reply.body)


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_renders_every_history(template) -> None:
    made = ChatTemplate(TEMPLATES[template])
    texts = []
    for name, messages in histories():
        # A template that looks at `m.tool_calls` of a message without any fails in jinja itself.
        text = render(made, parse(RouteKind.CHAT, body(messages)), {})
        assert "None" not in text, (name, text)
        assert "Undefined" not in text
        texts.append(text)
    if template != "chatml":
        assert len(set(texts)) > 3


@pytest.mark.parametrize("template", ["calls", "items"])
def test_forms_that_mean_the_same_render_the_same(template) -> None:
    made = ChatTemplate(TEMPLATES[template])

    def text(content: Any, arguments: Any) -> str:
        function = {"name": "f", "arguments": arguments}
        said = {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}
        return render(made, parse(RouteKind.CHAT, body([said])), {})

    assert len({text(c, "{}") for c in (None, "", [], [{"type": "text", "text": ""}])}) == 1
    assert len({text(None, a) for a in ("{}", "null", "", " ", {}, None)}) == 1
    assert len({text(None, a) for a in ('{"a": 1}', '{"a":1}', {"a": 1})}) == 1


@pytest.mark.parametrize(
    "calls",
    [
        5,
        "x",
        {},
        [5],
        [None],
        [{}],
        [{"function": None}],
        [{"function": "f"}],
        [{"function": {"name": "f", "arguments": "{"}}],
        [{"function": {"name": "f", "arguments": "[1"}}],
    ],
)
async def test_calls_that_are_none_are_refused(client, calls) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    reply = await client.ask("POST", CHAT, body([{"role": "user", "content": "A"}, said]))
    assert check_error(reply, 400)["param"].startswith("messages[1]")


@pytest.mark.parametrize("arguments", ["5", '"{}"', "[]", "[1]", "true", "0", 5, [1], True, 0])
async def test_arguments_that_are_no_object(client, arguments) -> None:
    """Any JSON is left to the template, as vLLM does it: shown, or refused by it."""
    said = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    assert (await client.ask("POST", CHAT, body([said]))).status == 200
    request = parse(RouteKind.CHAT, body([said]))
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert f"f({json.dumps(value or {})})" in render(ChatTemplate(TEMPLATES["calls"]), request, {})
    if value:
        with pytest.raises(BadRequest, match="cannot render"):
            render(ChatTemplate(TEMPLATES["items"]), request, {})


def test_a_template_that_refuses_says_so() -> None:
    """A model without tools: its own word is what the client reads."""
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('Tools are not for me.') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "tool", "content": "7", "tool_call_id": "c1"}]
    with pytest.raises(BadRequest, match=r"Tools are not for me\.") as caught:
        render(ChatTemplate(source), parse(RouteKind.CHAT, body(messages)), {})
    assert caught.value.param == "messages"
    assert not isinstance(caught.value, jinja2.TemplateError)


async def test_the_real_client_sends_its_own_answers_back(fake_worker) -> None:
    tool: Any = {"type": "function", "function": {"name": "now"}}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with sdk(fake_worker.url) as client:
        for choice in ("required", "none"):
            made = await client.chat.completions.create(
                model="fake", messages=messages, tools=[tool], tool_choice=choice, max_tokens=400
            )
            said = made.choices[0].message
            messages += [said, said.model_dump()]
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": None}
                for call in said.tool_calls or []
            ]
    assert len(messages) > 4
