"""Tools of a request: what is asked, the grammars that enforce it, and the shapes of the answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from enginerig import Rig
from tokenizers import Tokenizer

from shared.bytetok import byte_bundle
from shared.errors import BadRequest
from worker.chatshape import CallReading, ChatShape
from worker.detokenise import AnswerText, Detokenizer
from worker.fields import Fields
from worker.generation import Delta
from worker.grammar import GrammarCompiler
from worker.guide import GrammarSpec, allows
from worker.responses import Answer, Head
from worker.runner import TokenLogprob
from worker.sequence import FinishReason, SamplingParams
from worker.tokentext import TokenText
from worker.toolask import ToolAsk, read_tools
from worker.toolformat import HERMES, LLAMA, MISTRAL, ToolFormat, ToolSpeech
from worker.toolread import ToolReader, gather

TOKENS = TokenText(Tokenizer.from_str(byte_bundle().tokenizer_json))
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "maximum": 9}},
    "$defs": {"City": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": 'now"é', "description": "The time."}}


def tools(chat: bool = True, **fields: Any) -> ToolAsk | None:
    return read_tools(Fields(fields), chat=chat)


def asked(**fields: Any) -> ToolAsk:
    ask = tools(**{"tools": [WEATHER, NOW], **fields})
    assert ask is not None
    return ask


# --- the request -------------------------------------------------------------------------------


def test_choices() -> None:
    assert tools() is None
    assert tools(tools=[]) is None
    assert tools(tools=[], tool_choice="auto") is None
    assert tools(tools=[WEATHER], tool_choice="none") is None
    assert tools(chat=False, tools=[WEATHER]) is None
    assert not asked().required
    assert not asked(tool_choice="auto").single
    assert asked().names == {"weather", 'now"é'}
    assert asked(tool_choice="required").required
    assert asked(tool_choice="required", parallel_tool_calls=False).single
    named = asked(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert (named.names, named.required, named.single) == ({"weather"}, True, True)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [], "tool_choice": "required"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "any"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function"}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}),
        (
            "tool_choice",
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        ),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": 7}),
        ("tool_choice", {"chat": False, "tools": [WEATHER], "tool_choice": "required"}),
        ("tools", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": 7}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
        ("tools", {"tools": [WEATHER] * 513}),
        ("parallel_tool_calls", {"tools": [WEATHER], "parallel_tool_calls": "no"}),
    ],
)
def test_what_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        tools(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


# --- grammars ----------------------------------------------------------------------------------


SPECIAL = frozenset({256, 257, 258})


def ordinary(_text: str) -> int | None:
    return None


def marked(text: str) -> int | None:
    """As if some markers were special tokens of the byte tokenizer."""
    return {"[TOOL_CALLS]": 256, "<tool_call>": 256, "</tool_call>": 258}.get(text)


@pytest.mark.parametrize("added_id", [ordinary, marked])
@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("single", [False, True])
def test_enforced_calls_are_calls(
    form: ToolFormat, added_id: Callable[[str], int | None], single: bool
) -> None:
    pytest.importorskip("llguidance")
    speech = ToolSpeech(form, added_id, SPECIAL.__contains__)
    ask = asked(tool_choice="required", parallel_tool_calls=not single)
    spec = speech.grammar(ask, None)
    assert spec is not None
    compiler = GrammarCompiler(byte_bundle().tokenizer_json, 259, (257,))
    grammar = compiler.compile(spec)
    rig = Rig(n_blocks=400, eos_every=2)
    rng = random.Random(form.opening)
    params = [SamplingParams(max_tokens=3000, seed=each) for each in range(12)]
    ids = [rig.submit(rng.choices(range(256), k=20), each, grammar=grammar) for each in params]
    rig.run()
    counts = set()
    for request_id in ids:
        answer = rig.answers[request_id]
        assert answer.finish is FinishReason.STOP
        text = AnswerText(Detokenizer(_decode), (), 0, speech.shown)
        spoken = "".join(text.push(token, 1).text for token in answer.tokens if token != 257)
        reader = ToolReader(form, ask.names)
        parts = [*reader.push(spoken + text.finish().text), *reader.finish()]
        content, calls = gather(parts)
        assert (content, bool(calls)) == ("", True), spoken
        counts.add(len(calls))
        for call in calls:
            arguments = json.loads(call.arguments)
            if call.name == "weather":
                assert arguments["city"] in ("Paris", "Oslo")
                assert arguments.get("days", 0) <= 9
            else:
                assert arguments == {}
    assert counts == {1} if single else len(counts) > 1


def _decode(ids: Any) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def test_a_form_and_tools_together_allow_either() -> None:
    pytest.importorskip("llguidance")
    speech = ToolSpeech(HERMES, ordinary, SPECIAL.__contains__)
    form = GrammarSpec("json", '{"type":"boolean"}', "response_format")
    spec = speech.grammar(asked(), form)
    assert spec is not None
    assert spec.param == "response_format"
    compiler = GrammarCompiler(byte_bundle().tokenizer_json, 259, (257,))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    for text, fits in (("true", True), (call, True), ("maybe", False), (call[:-60], False)):
        guide = compiler.compile(spec).start()
        for byte in text.encode():
            guide.advance(byte)
        end = guide.allowed()[257 // 8] >> 257 % 8 & 1
        assert (guide.error is None and bool(end)) == fits
    regex = GrammarSpec("regex", "a", "guided_regex")
    assert speech.grammar(asked(), regex) is regex
    assert speech.grammar(asked(), None) is None


def test_a_bad_parameter_schema_is_refused_where_it_is_enforced() -> None:
    pytest.importorskip("llguidance")
    bad = {"name": "f", "parameters": {"properties": {"a": {"type": "foo"}}}}
    ask = asked(tools=[{"type": "function", "function": bad}], tool_choice="required")
    spec = ToolSpeech(HERMES, ordinary, SPECIAL.__contains__).grammar(ask, None)
    assert spec is not None
    with pytest.raises(BadRequest) as caught:
        GrammarCompiler(byte_bundle().tokenizer_json, 259, (257,)).compile(spec)
    assert caught.value.param == "tools"


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
GOOD, LOOSE = '{"city": "Oslo"}', '{"city": "Rome", "x": []}'


def said(form: ToolFormat, *arguments: str, name: str = "weather") -> str:
    """Calls as a model of this format writes them."""
    calls = [f'{{"name": "{name}", "{form.arguments}": {each}}}' for each in arguments]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return f"[TOOL_CALLS][{', '.join(calls)}]" if form is MISTRAL else "; ".join(calls)


def follows(
    form: ToolFormat, added_id: Callable[[str], int | None], ask: ToolAsk, text: str
) -> bool:
    """Whether a free answer may be this text, and end there."""
    speech = ToolSpeech(form, added_id, SPECIAL.__contains__)
    spec = speech.grammar(ask, None)
    assert spec is not None
    guide = COMPILER.compile(spec).start()
    tokens: list[int] = []
    while text:
        mark = next((m for m in (form.opening, form.closing) if m and text.startswith(m)), None)
        token = added_id(mark) if mark else None
        size = len(mark or "") if token is not None else 1
        tokens += [token] if token is not None else [*text[0].encode()]
        text = text[size:]
    for token in tokens:
        if guide.ended or not allows(guide.allowed(), token):
            return False
        guide.advance(token)
    return guide.ended or allows(guide.allowed(), 257)


COMPILER = GrammarCompiler(byte_bundle().tokenizer_json, 259, (257,))


@pytest.mark.parametrize("added_id", [ordinary, marked])
@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_free_answers_under_watch(
    form: ToolFormat, added_id: Callable[[str], int | None], single: bool, strict: bool
) -> None:
    """``strict`` and ``parallel_tool_calls: false`` without a required call: text stays free, and
    what begins as a call can only become one of the wanted form."""
    ask = asked(tools=[STRICT if strict else WEATHER, NOW], parallel_tool_calls=not single)
    assert ask.guarded == (single or strict)
    if not ask.guarded:
        assert ToolSpeech(form, added_id, SPECIAL.__contains__).grammar(ask, None) is None
        return

    def ok(text: str) -> bool:
        return follows(form, added_id, ask, text)

    plain = ("", "Hello.\n\n{x} é🌍 </tool> <tool [TOOL", " \n", "a < b, [1] <|", 'say "name": {')
    assert [text for text in plain if not ok(text)] == []
    before = "" if form is LLAMA else "Let me see.\n"
    assert ok(before + said(form, GOOD))
    assert ok(said(form, GOOD))
    assert ok(said(form, "{}", name='now\\"é'))
    assert ok(before + said(form, LOOSE)) != strict
    assert ok(before + said(form, GOOD, GOOD)) != single
    assert not ok(said(form, GOOD, name="nobody"))
    assert not ok(said(form, '{"city": '))
    assert not ok(said(form, "[]"))
    assert not ok(said(form, GOOD)[:-4])
    if form is LLAMA:
        assert ok("I call: <|python_tag|>" + said(form, GOOD))
        assert not ok('{"a": 1}')


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
@pytest.mark.parametrize("single", [False, True])
def test_free_answers_that_call_all_the_time(form: ToolFormat, single: bool) -> None:
    """A bias makes the engine open a call wherever it may: each is of the wanted form."""
    speech = ToolSpeech(form, marked, SPECIAL.__contains__)
    ask = asked(tools=[STRICT, NOW], parallel_tool_calls=not single)
    spec = speech.grammar(ask, None)
    assert spec is not None
    grammar = COMPILER.compile(spec)
    rig = Rig(n_blocks=400, eos_every=2)
    ids = [
        rig.submit(
            [97, number], SamplingParams(2000, seed=number, logit_bias={256: 30.0}), grammar=grammar
        )
        for number in range(20)
    ]
    rig.run()
    counts = set()
    for request_id in ids:
        answer = rig.answers[request_id]
        assert answer.finish is FinishReason.STOP
        text = AnswerText(Detokenizer(_decode), (), 0, speech.shown)
        spoken = "".join(text.push(token, 1).text for token in answer.tokens if token != 257)
        reader = ToolReader(form, ask.names)
        parts = [*reader.push(spoken + text.finish().text), *reader.finish()]
        content, calls = gather(parts)
        assert content == "", spoken
        counts.add(len(calls))
        for call in calls:
            arguments = json.loads(call.arguments)
            assert call.name != "weather" or arguments["city"] in ("Paris", "Oslo")
    assert counts <= {0, 1} if single else max(counts) > 1
    assert 1 in counts


@pytest.mark.parametrize("strict", ["yes", 1, []])
def test_strict_is_a_boolean(strict: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": strict}}
    with pytest.raises(BadRequest) as caught:
        tools(tools=[tool])
    assert caught.value.param == "tools"


def test_special_tokens_that_are_shown() -> None:
    text = AnswerText(Detokenizer(_decode), ("]x",), 0, {256: "[TOOL_CALLS]"})
    pieces = [text.push(token, 1) for token in (*"é".encode(), 258, 256, *b"{}")]
    assert "".join(piece.text for piece in pieces) + text.finish().text == "é[TOOL_CALLS]{}"
    stopped = AnswerText(Detokenizer(_decode), ("]x",), 0, {256: "[TOOL_CALLS]"})
    pieces = [stopped.push(token, 1) for token in (256, ord("x"))]
    assert ("".join(piece.text for piece in pieces), pieces[-1].stop) == ("[TOOL_CALLS", "]x")


# --- shapes ------------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def deltas(text: str, size: int, finish: FinishReason, *, logprobs: bool = False) -> list[Delta]:
    made = []
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        tokens = tuple(piece.encode())
        entries = tuple(TokenLogprob(-0.5) for _ in tokens) if logprobs else None
        made.append(Delta(piece, tokens, entries, None, 0, 3, start + size))
    return [*made, Delta("", (257,), (TokenLogprob(-1.0),) if logprobs else None, finish, 0, 3, 9)]


def shape() -> ChatShape:
    reading = CallReading(HERMES, frozenset({"weather"}))
    return ChatShape(Head("chatcmpl-1", 7, "m", False), TOKENS, reading)


def gathered(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the chunks of one choice."""
    content, calls, finish, entries = "", [], None, 0
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert finish is None
        finish = choice["finish_reason"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        entries += len((choice["logprobs"] or {"content": []})["content"])
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["type"] == "function"
                assert piece["function"]["arguments"] == ""
                calls.append({**piece, "function": dict(piece["function"])})
                del calls[-1]["index"]
            else:
                assert set(piece) == {"index", "function"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {"content": content, "calls": calls, "finish": finish, "logprobs": entries}


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Just text. ", "Just text. ", 0),
        (CALL, "", 1),
        (f"Two:\n{CALL}\n{CALL}\n", "Two:", 2),
        (CALL + CALL[:40], CALL[:40], 1),
        (CALL[:40], CALL[:40], 0),
        (CALL[:55], "", 1),
        (f"{CALL} and {CALL[:60]}", " and", 2),
    ],
)
def test_streamed_equals_whole(
    text: str, content: str, calls: int, size: int, finish: FinishReason, logprobs: bool
) -> None:
    streamed, whole = shape(), shape()
    answer = Answer(0)
    all_deltas = deltas(text, size, finish, logprobs=logprobs)
    chunks = streamed.opening(2, all_deltas[0])
    for delta in all_deltas:
        chunks += streamed.chunks(2, delta)
        answer.add(delta)
    got = gathered(chunks)
    choice = whole.whole([Answer(0), Answer(0), answer])["choices"][2]
    message = choice["message"]
    assert got["content"] == content == (message["content"] or "")
    assert got["calls"] == message.get("tool_calls", [])
    assert len(got["calls"]) == calls
    assert got["finish"] == choice["finish_reason"]
    ended = finish is FinishReason.STOP and calls
    assert got["finish"] == ("tool_calls" if ended else finish)
    assert got["logprobs"] == (len(text) + 1 if logprobs else 0)
    if calls:
        assert (message["content"] is None) == (not content)
        assert len({call["id"] for call in got["calls"]}) == calls
        first = got["calls"][0]["function"]
        assert first["name"] == "weather"
        assert '{"city": "Oslo"}'.startswith(first["arguments"])
    else:
        assert "tool_calls" not in message


def test_without_tools_text_that_looks_like_a_call_is_text() -> None:
    plain = ChatShape(Head("x", 7, "m", False), TOKENS)
    answer = Answer(0)
    for delta in deltas(CALL, 5, FinishReason.STOP):
        answer.add(delta)
    (choice,) = plain.whole([answer])["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
