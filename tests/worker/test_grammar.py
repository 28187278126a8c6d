"""Compiled grammars: what they allow, where they end, and what is refused with which words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from tokenizers import AddedToken

from shared.bundle import open_tokenizer
from shared.bytetok import byte_bundle
from shared.errors import BadRequest
from worker import lark
from worker.fields import Fields
from worker.grammar import GrammarCompiler
from worker.guide import GrammarSpec, Guide, allows, without
from worker.keptgrammars import MOST_OF_ONE
from worker.structured import read_form

pytest.importorskip("llguidance")
ENDS = (257, 258)
COMPILER = GrammarCompiler(byte_bundle().tokenizer_json, 300, ENDS)


def guide(**fields: Any) -> Guide:
    spec = read_form(Fields(fields))
    assert spec is not None
    return COMPILER.compile(spec).start()


def feed(made: Guide, text: str) -> bool:
    """Whether every byte of ``text`` was allowed when its turn came."""
    for byte in text.encode():
        if not allows(made.allowed(), byte):
            return False
        made.advance(byte)
        assert made.error is None
    return True


def options(made: Guide) -> set[int]:
    mask = made.allowed()
    return {token for token in range(len(mask) * 8) if allows(mask, token)}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/Y"}},
    "$defs": {"Y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}]}', "[1]"),
        ({"response_format": schema(POINT)}, '{"x": 1,\n  "y": "b"}', '{"x": 1, "y": "c"}'),
        ({"structured_outputs": {"json": POINT}}, '{"x":-7,"y":"a"}', '{"y":"a"}'),
        ({"guided_json": json.dumps(POINT)}, '{"x":0,"y":"a"}', '{"x":0.5,"y":"a"}'),
        ({"structured_outputs": {"regex": "a/b[0-9]{2}"}}, "a/b42", "a/bx"),
        ({"guided_regex": "(yes|no)!"}, "yes!", "maybe"),
        ({"guided_choice": ['x\n"q"', "é🌍", "y"]}, 'x\n"q"', "x\n'"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "right", "lefthand"),
        ({"structured_outputs": {"json_object": True}}, "{}", "7"),
    ],
)
def test_what_each_form_allows(fields: dict[str, Any], good: str, bad: str) -> None:
    made = guide(**fields)
    assert feed(made, good)
    assert made.ended
    assert options(made) == set(ENDS)
    assert not feed(guide(**fields), bad)


def test_every_end_token_is_allowed_where_the_answer_may_end_and_nowhere_else() -> None:
    made = guide(guided_regex="ab*")
    assert options(made) == {ord("a")}
    made.advance(ord("a"))
    assert options(made) == {ord("b"), *ENDS}
    assert not made.ended
    made.advance(258)
    assert made.ended
    assert made.error is None


def test_an_end_in_the_wrong_place_and_a_wrong_token_are_errors() -> None:
    for token in (257, ord("x"), 299):
        made = guide(guided_regex="abc")
        made.advance(ord("a"))
        made.advance(token)
        assert made.error is not None
        assert "\n" not in made.error


def test_white_space_is_bounded() -> None:
    made = guide(response_format={"type": "json_object"})
    assert feed(made, "{\n" + " " * 32)
    assert options(made) & set(b" \n\t") == set()
    assert not feed(guide(response_format={"type": "json_object"}), "{  ")


def test_a_schema_cannot_loosen_its_own_checks() -> None:
    with pytest.raises(BadRequest):
        guide(response_format=schema({"type": "array", "uniqueItems": True}))
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(BadRequest):
        guide(response_format=schema(lenient))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", schema({"type": "foo"})),
        ("response_format", schema({"$ref": "http://example.invalid/x.json"})),
        ("response_format", schema({"type": "string", "format": "nope"})),
        ("response_format", schema(False)),
        ("response_format", schema({"type": "object", "properties": 7})),
        ("guided_json", {"enum": []}),
        ("guided_regex", "(a"),
        ("guided_regex", "(?=a)b"),
        ("guided_regex", "(" * 5000 + ")" * 5000),
        ("structured_outputs", {"regex": "["}),
        ("guided_regex", "a" * (1 << 20) + "b"),
    ],
)
def test_what_cannot_be_enforced_is_400_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        guide(**{field: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(f"'{field}'")
    assert len(caught.value.message) < 400
    assert "\n" not in caught.value.message


def test_a_deeply_nested_schema_is_refused_not_fatal() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(BadRequest):
        guide(response_format=schema(deep))


def test_two_forms_exclude_each_other() -> None:
    with pytest.raises(BadRequest) as caught:
        guide(response_format={"type": "json_object"}, guided_regex="a")
    assert caught.value.param == "guided_regex"
    assert read_form(Fields({"response_format": {"type": "text"}, "guided_regex": None})) is None


def test_guides_of_one_grammar_do_not_know_each_other() -> None:
    grammar = COMPILER.compile(GrammarSpec("regex", "abc", "guided_regex"))
    first, second = grammar.start(), grammar.start()
    assert feed(first, "ab")
    assert options(first) == {ord("c")}
    assert options(second) == {ord("a")}
    assert options(grammar.start()) == {ord("a")}


def test_grammars_are_kept_up_to_a_number() -> None:
    compiler = GrammarCompiler(byte_bundle().tokenizer_json, 259, ENDS)
    first = compiler.compile(GrammarSpec("regex", "x", "p"))
    assert compiler.compile(GrammarSpec("regex", "x", "q")) is first
    for each in range(MOST_OF_ONE):
        compiler.compile(GrammarSpec("regex", f"y{each}", "p"))
    assert compiler.compile(GrammarSpec("regex", "x", "p")) is not first


def test_another_ones_grammar_takes_its_time() -> None:
    """Or a tenant could tell by its answers' times which forms another one asks for."""
    compiler = GrammarCompiler(byte_bundle().tokenizer_json, 259, ENDS)
    spec = GrammarSpec("regex", "x", "p")
    made = [compiler.compile(spec, salt) for salt in ("", "a", "b")]
    assert len(set(map(id, made))) == 3
    assert [compiler.compile(spec, salt) for salt in ("", "a", "b")] == made


def test_a_tokenizer_the_library_cannot_read_is_said_so() -> None:
    odd = '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
    with pytest.raises(BadRequest, match="not supported with this model's tokenizer"):
        GrammarCompiler(odd, 1, ()).compile(GrammarSpec("regex", "a", "guided_regex"))


def test_text_that_looks_like_a_special_or_added_token_is_spelled_out() -> None:
    tokenizer = open_tokenizer(byte_bundle())
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    compiler = GrammarCompiler(tokenizer.to_str(), 260, ENDS)
    for text in ("<|im_end|>", "<tool_call>", "x<|im_start|>y"):
        for spec in (
            GrammarSpec("regex", re.escape(text), "p"),
            GrammarSpec("json", json.dumps({"const": text}), "p"),
            GrammarSpec("lark", lark.one_of([text]), "p"),
        ):
            made = compiler.compile(spec).start()
            assert feed(made, json.dumps(text) if spec.kind == "json" else text)
            assert made.ended
    made = compiler.compile(GrammarSpec("lark", f"start: {lark.added(259)}", "p")).start()
    assert options(made) == {259}
    made.advance(259)
    assert made.ended


def test_thousands_of_choices_are_cheap() -> None:
    texts = ["x" * 50 + str(each) for each in range(4096)]
    made = guide(guided_choice=texts)
    begun = time.process_time()
    assert feed(made, texts[777])
    assert time.process_time() - begun < 60, "tens of thousands of times what it takes"


def test_masks() -> None:
    mask = bytes([0b101, 0b1])
    assert [token for token in range(40) if allows(mask, token)] == [0, 2, 8]
    assert without(mask, frozenset({2, 8, 1000})) == bytes([0b1, 0])
    assert without(mask, frozenset({0, 2, 8})) == mask


def test_the_library_is_imported_when_it_is_needed_and_its_lack_is_named() -> None:
    code = (
        "import sys, worker.build\n"
        "assert 'llguidance' not in sys.modules\n"
        "sys.modules['llguidance'] = None\n"
        "from worker.grammar import GrammarCompiler\n"
        "from worker.guide import GrammarSpec\n"
        "GrammarCompiler('{}', 1, ()).compile(GrammarSpec('regex', 'a', 'guided_regex'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "'guided_regex' needs the package 'llguidance'" in done.stderr
