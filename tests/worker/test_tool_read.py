"""Tool calls in a model's text: what is one, what is not, and that cutting it changes nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from depth import DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.calljson import Call
from worker.toolformat import HERMES, LLAMA, MISTRAL, ToolFormat, format_of
from worker.toolread import Arguments, Opened, Part, ToolReader, gather

NAMES = frozenset({"f", "get_weather"})
F1 = Call("f", '{"a": 1}')
W = Call("get_weather", '{"city": "Paris </tool_call> [TOOL_CALLS] \\" }", "n": [1, {"b": []}]}')


Told = str | Call
"""Content or a call, put together."""


def merged(parts: list[Part]) -> list[Told]:
    """Parts with neighbouring content, and the pieces of each call, joined."""
    out: list[Told] = []
    for part in parts:
        if isinstance(part, Opened):
            out.append(Call(part.name, ""))
        elif isinstance(part, Arguments):
            assert part.text
            call = out.pop()
            assert isinstance(call, Call), "arguments of no call"
            out.append(Call(call.name, call.arguments + part.text))
        elif out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return out


def read(form: ToolFormat, *pieces: str) -> list[Told]:
    reader = ToolReader(form, NAMES)
    parts = [part for piece in pieces for part in reader.push(piece)]
    parts += reader.finish()
    told = merged(parts)
    content, calls = gather(parts)
    assert content == "".join(part for part in told if isinstance(part, str))
    assert calls == [part for part in told if isinstance(part, Call)]
    return told


def tagged(call: Call) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'


def bare(call: Call) -> str:
    return f'{{"name": "{call.name}", "parameters": {call.arguments}}}'


def listed(*calls: Call) -> str:
    items = [f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in calls]
    return f"[TOOL_CALLS] [{', '.join(items)}]"


def content(form: ToolFormat, text: str) -> tuple[ToolFormat, str, list[Told]]:
    """A text that holds no call."""
    return form, text, [text]


CASES: list[tuple[ToolFormat, str, list[Told]]] = [
    # plain text stays as it is
    (HERMES, "Hello there.\n", ["Hello there.\n"]),
    (HERMES, "", []),
    (HERMES, " \n ", [" \n "]),
    (LLAMA, "  Hello {x}", ["  Hello {x}"]),
    (LLAMA, " \n", [" \n"]),
    (MISTRAL, "[1, 2] and [TOOL", ["[1, 2] and [TOOL"]),
    # calls alone, one after the other, and amid text
    (HERMES, tagged(F1), [F1]),
    (HERMES, "\n\n" + tagged(W) + "\n" + tagged(F1) + "\n", [W, F1]),
    (HERMES, "Let me see.\n" + tagged(F1) + " So.\n", ["Let me see.", F1, " So."]),
    (HERMES, '<tool_call>{"arguments":{},"name":"f"}</tool_call>', [Call("f", "{}")]),
    (HERMES, '<tool_call>{"name":"f"}</tool_call>', [Call("f", "{}")]),
    (HERMES, '<tool_call>{"name":"f","arguments":null}', [Call("f", "{}")]),
    (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}', [F1]),
    (HERMES, tagged(F1)[:-5], [F1]),
    (MISTRAL, listed(F1), [F1]),
    (MISTRAL, "Sure: " + listed(F1, W) + "\n", ["Sure:", F1, W]),
    (MISTRAL, listed(F1).replace(" [", "["), [F1]),
    (MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}} ok', [F1, " ok"]),
    (LLAMA, bare(F1), [F1]),
    (LLAMA, " " + bare(F1) + "; " + bare(W), [F1, W]),
    (LLAMA, bare(F1) + "\n" + bare(W) + ";", [F1, W]),
    (LLAMA, "<|python_tag|>" + bare(W), [W]),
    (LLAMA, "I call: <|python_tag|> " + bare(F1), ["I call:", F1]),
    (LLAMA, bare(F1) + " done", [F1, " done"]),
    (LLAMA, bare(F1) + "; and", [F1, "; and"]),
    # a call that has begun stays one, whatever comes of it
    (MISTRAL, listed(F1)[:-1], [F1]),
    (MISTRAL, listed(F1, W)[:-9], [F1, Call("get_weather", W.arguments[:-7])]),
    (MISTRAL, listed(F1, Call("g", "{}")), [F1, ', {"name": "g", "arguments": {}}]']),
    (MISTRAL, listed(F1)[:-1] + ", 7] x", [F1, ", 7] x"]),
    (MISTRAL, listed(F1)[:-2] + "] x", [F1, " x"]),
    (HERMES, tagged(F1).replace("}}", "}"), [F1]),
    (HERMES, tagged(F1).replace("}}", "} oh"), [F1, " oh\n</tool_call>"]),
    (HERMES, tagged(F1).replace("}}", '}, "id": "}"}') + tagged(F1), [F1, F1]),
    (HERMES, tagged(F1).replace("}}", '}, "id": 7'), [F1, ', "id": 7\n</tool_call>']),
    (HERMES, tagged(F1).replace("1}}", ""), [Call("f", '{"a": \n</tool_call>')]),
    (HERMES, tagged(Call("f", '{"a": oops}')), [Call("f", '{"a": oops}')]),
    (HERMES, tagged(W)[:60], [Call("get_weather", W.arguments[:11])]),
    (LLAMA, bare(F1) + "; " + bare(W)[:50], [F1, Call("get_weather", W.arguments[:12])]),
    # what only looks like a call is content, and what follows it is still looked at
    (LLAMA, '{"a": 1}', ['{"a": 1}']),
    (LLAMA, '{"name": "f"', ['{"name": "f"']),
    content(LLAMA, '{"name": "unknown", "parameters": {}} x '),
    (LLAMA, "the object " + bare(F1), ["the object " + bare(F1)]),
    (HERMES, "<tool_call>soon</tool_call>", ["<tool_call>soon</tool_call>"]),
    (HERMES, "a <tool_call> b " + tagged(F1), ["a <tool_call> b", F1]),
    content(HERMES, '<tool_call>\n{"name": "g", "arguments": {}}'),
    content(HERMES, '<tool_call>{"name": "f", "arguments": 7}!'),
    content(HERMES, '<tool_call>{"name": "f", "arguments": "x"}'),
    (HERMES, "<tool_call>{'name': 'f'}\n", ["<tool_call>{'name': 'f'}\n"]),
    (HERMES, "x\n" + tagged(F1)[:30], ["x\n" + tagged(F1)[:30]]),
    (HERMES, "x <tool_call>\n", ["x <tool_call>\n"]),
    (HERMES, tagged(F1) + "\n" + tagged(W)[:40], [F1, "\n" + tagged(W)[:40]]),
    (HERMES, tagged(Call("f", "{'a': 1}")), [tagged(Call("f", "{'a': 1}"))]),
    (HERMES, tagged(Call("f", "{a: 1}")), [tagged(Call("f", "{a: 1}"))]),
    (HERMES, tagged(F1).replace('"f"', '"\\x"'), [tagged(F1).replace('"f"', '"\\x"')]),
    (LLAMA, bare(F1) + '; {"x": 1}', [F1, '; {"x": 1}']),
    (HERMES, "<tool_call>{]}", ["<tool_call>{]}"]),
    (HERMES, "<tool_call><tool_call>", ["<tool_call><tool_call>"]),
    (MISTRAL, "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    (MISTRAL, listed(Call("g", "{}"), F1), [listed(Call("g", "{}"), F1)]),
    (MISTRAL, "[TOOL_CALLS]f{}", ["[TOOL_CALLS]f{}"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_whole_and_character_by_character(
    form: ToolFormat, text: str, expected: list[Told]
) -> None:
    assert read(form, text) == expected
    assert read(form, *text) == expected


def test_nothing_is_lost_of_text_without_calls() -> None:
    for form, text, expected in CASES:
        if not any(isinstance(part, Call) for part in expected):
            assert expected == ([text] if text else []), (form, text)


def test_content_and_arguments_are_given_out_at_once() -> None:
    reader = ToolReader(HERMES, NAMES)
    assert reader.push("Hello, ") == ["Hello,"]
    assert reader.push("you <tool") == [" you"]
    assert reader.push("box>") == [" <toolbox>"]
    assert reader.push('<tool_call>{"name": "f", "arguments": {') == []
    assert reader.push('"a') == [Opened("f"), Arguments('{"a')]
    assert reader.push('": "') == [Arguments('": "')]
    assert reader.push('}</tool_call>"') == [Arguments('}</tool_call>"')]
    assert reader.push("}") == [Arguments("}")]
    assert reader.push("}\n</tool_call>") == []
    assert reader.finish() == []


def test_members_in_another_order_are_given_out_when_they_are_complete() -> None:
    reader = ToolReader(HERMES, NAMES)
    assert reader.push('<tool_call>{"arguments": {"a": 1}, "name": "f"') == []
    assert reader.push("}") == [Opened("f"), Arguments('{"a": 1}')]


def test_a_long_object_that_is_no_call_costs_little() -> None:
    reader = ToolReader(LLAMA, NAMES)
    text = '{"poem": "' + "la " * 100_000 + '"}'
    assert not any(reader.push(text[at : at + 3]) for at in range(0, len(text) - 3, 3))
    assert "".join(map(str, [*reader.push(text[-1 - (len(text) - 1) % 3 :]), *reader.finish()]))


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "[TOOL_", "<|"),
        *("{", "}", "[", "]", ";", " ", "\n", '"', "\\", "text", "{}", ","),
        *('"name": "f"', '"name": "g"', '"arguments": {"a": 1}', '"parameters": {}'),
        *(tagged(F1), tagged(W), bare(F1), bare(W), listed(F1), listed(F1, W)),
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([HERMES, MISTRAL, LLAMA]),
    st.lists(FRAGMENTS, max_size=12).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_how_the_text_is_cut_does_not_matter(form: ToolFormat, text: str, at: list[int]) -> None:
    cuts = [0, *sorted(min(each, len(text)) for each in at), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    whole = read(form, text)
    assert read(form, *pieces) == whole == read(form, *text)
    calls = [part for part in whole if isinstance(part, Call)]
    for call in calls:
        assert call.name in NAMES
        assert call.arguments.startswith("{")
    if not calls:
        assert "".join(map(str, whole)) == text


SPACES = st.sampled_from(["", " ", "\n", "  \n\t"])
VALUES = st.text(max_size=8) | st.sampled_from(
    [None, True, -1.5e300, [], {}, {"a": [{"b": None}]}, '"}', "</tool_call>", "\\", '\\"', "é🌍"]
)


@settings(max_examples=80 * DEPTH, deadline=None)
@given(
    st.sampled_from([HERMES, MISTRAL, LLAMA]),
    st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), VALUES)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["", "Well. "]),
    SPACES,
    st.booleans(),
    st.data(),
)
def test_written_calls_are_read_back(
    form: ToolFormat,
    written: list[tuple[str, dict[str, Any]]],
    before: str,
    space: str,
    ascii_only: bool,
    data: st.DataObject,
) -> None:
    """Any number of calls with any arguments, cut anywhere: names and arguments come out as they
    were written, and the pieces of a prefix are the beginning of the pieces of the whole."""
    calls = [Call(name, json.dumps(args, ensure_ascii=ascii_only)) for name, args in written]
    objects = [
        f'{{{space}"name":{space}"{call.name}",{space}"{form.arguments}":{space}{call.arguments}}}'
        for call in calls
    ]
    if form is HERMES:
        text = before + space.join(f"<tool_call>{o}{space}</tool_call>" for o in objects)
    elif form is MISTRAL:
        text = f"{before}[TOOL_CALLS]{space}[{(',' + space).join(objects)}]"
    else:
        text = (before and f"{before}<|python_tag|>") + (";" + space).join(objects)
    reader = ToolReader(form, NAMES)
    parts: list[Part] = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts += reader.push(rest[:size])
        rest = rest[size:]
    told = merged([*parts, *reader.finish()])
    assert told == [*([before.rstrip()] if before else []), *calls]
    assert told == read(form, text)
    shorter = read(form, text[: data.draw(st.integers(0, len(text)))])
    for early, late in zip(
        (part for part in shorter if isinstance(part, Call)), calls, strict=False
    ):
        assert early.name == late.name
        assert late.arguments.startswith(early.arguments)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, HERMES),
        ("{{ messages }}", HERMES),
        ("<tools></tools> within <tool_call></tool_call> tags", HERMES),
        ("{{ '[TOOL_CALLS]' }}[AVAILABLE_TOOLS]", MISTRAL),
        ("{{- '<|python_tag|>' }}", LLAMA),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', LLAMA),
    ],
)
def test_the_chat_template_decides(template: str | None, expected: ToolFormat) -> None:
    assert format_of(template) is expected


def test_call_ids() -> None:
    first = HERMES.call_id("chatcmpl-1", 0, 0)
    assert first.startswith("call_")
    assert first == HERMES.call_id("chatcmpl-1", 0, 0)
    assert len({HERMES.call_id("chatcmpl-1", a, b) for a in range(5) for b in range(5)}) == 25
    assert MISTRAL.call_id("chatcmpl-1", 0, 0).isalnum()
    assert len(MISTRAL.call_id("chatcmpl-1", 0, 0)) == 9
