"""Rendering and encoding with the byte tokenizer: no model files needed (cases A12, A13, B14)."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from shared.blocks import Scope, chain_keys, pack_tokens, unpack_tokens
from shared.bundle import TokenizerBundle
from shared.errors import BadRequest
from shared.openai import GenerateRequest, RouteKind, parse
from shared.render import Renderer, TextChain, UnsupportedContent, byte_bundle
from shared.shownpieces import LONG_ENOUGH, ShownPieces, make_area_file

ROOT = Scope("m", "t").root(b"key")
PARTS = (
    "{% for m in messages %}[{% for part in m.content %}({{ part.text }}){% endfor %}]{% endfor %}"
)


def chat(messages: Sequence[dict[str, Any]], **fields: Any) -> GenerateRequest:
    return parse(RouteKind.CHAT, json.dumps({"messages": messages, **fields}).encode())


def completion(prompt: object, **fields: Any) -> GenerateRequest:
    return parse(RouteKind.COMPLETIONS, json.dumps({"prompt": prompt, **fields}).encode())


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def counted(renderer: Renderer) -> list[str]:
    """Every text that the renderer encodes from now on."""
    seen: list[str] = []
    real = renderer.tokenizer

    class Counting:
        def encode(self, text: str, add_special_tokens: bool = True) -> Any:
            seen.append(text)
            return real.encode(text, add_special_tokens=add_special_tokens)

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> Any:
            seen.extend(texts)
            return real.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    renderer.tokenizer = Counting()  # type: ignore[assignment]
    return seen


@pytest.fixture
def renderer() -> Renderer:
    return Renderer(byte_bundle())


def with_template(template: str) -> Renderer:
    bundle = byte_bundle()
    return Renderer(TokenizerBundle(bundle.tokenizer_json, template))


def test_a_chat_in_text_and_tokens(renderer: Renderer) -> None:
    encoded = renderer.encode_request(chat(user("hé")))
    assert encoded.text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.tokens == [
        256, *b"user\nh\xc3\xa9", 257, *b"\n", 256, *b"assistant\n"
    ]  # fmt: skip
    assert renderer.decode(encoded.tokens) == encoded.text


# --- A12: content as a list of parts ---


def test_one_text_part_is_the_text(renderer: Renderer) -> None:
    parts = renderer.encode_request(chat(user([{"type": "text", "text": "ab cd"}])))
    assert parts.tokens == renderer.encode_request(chat(user("ab cd"))).tokens


def test_all_parts_reach_a_template_for_plain_text(renderer: Renderer) -> None:
    parts = [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}, "gamma"]
    assert "alpha\nbeta\ngamma" in renderer.render_chat(chat(user(parts)))


def test_a_template_for_parts_gets_parts() -> None:
    renderer = with_template(PARTS)
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert renderer.render_chat(chat(user(parts))) == "[(a)(b)]"
    assert renderer.render_chat(chat(user("a"))) == "[(a)]"
    assert renderer.render_chat(chat(user(None))) == "[]"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "x"}])
def test_other_parts_are_refused(renderer: Renderer, part: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedContent) as caught:
        renderer.render_chat(chat(user([{"type": "text", "text": "a"}, part])))
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.status == 400


# --- A13: no content, tool calls ---


@pytest.mark.parametrize("content", ["", None, []])
def test_empty_content_is_empty_text(renderer: Renderer, content: object) -> None:
    history = [*user("A"), {"role": "assistant", "content": content}, *user("B")]
    missing = [*user("A"), {"role": "assistant"}, *user("B")]
    text = renderer.render_chat(chat(history))
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nB" in text
    assert renderer.render_chat(chat(missing)) == text


def call(arguments: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{}", "{}"),
        ('{"a": 1}', '{"a": 1}'),
        ("null", "{}"),
        ("", "{}"),
        (None, "{}"),
        ("[1]", "[1]"),
    ],
)
def test_tool_arguments_become_objects(renderer: Renderer, arguments: object, shown: str) -> None:
    history = [
        *user("A"),
        {"role": "assistant", "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    assert f'{{"name": "f", "arguments": {shown}}}' in renderer.render_chat(chat(history))


def test_a_request_is_not_changed_by_rendering(renderer: Renderer) -> None:
    request = chat([*user(["a", "b"]), {"role": "assistant", "tool_calls": [call('{"a": 1}')]}])
    before = json.dumps(request.messages)
    renderer.render_chat(request)
    assert json.dumps(request.messages) == before


def test_an_empty_list_of_calls_is_no_call() -> None:
    renderer = with_template("{{ 'tool_calls' in messages[0] }}")
    assert renderer.render_chat(chat([{"role": "assistant", "tool_calls": []}])) == "False"


@pytest.mark.parametrize("bad", [call("{"), call("[" * 20_000), {"id": "c"}, {"function": "f"}])
def test_broken_calls_are_a_client_error(renderer: Renderer, bad: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        renderer.render_chat(chat([{"role": "assistant", "tool_calls": [bad]}]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.x }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ],
)
def test_a_failing_template_is_a_client_error(template: str) -> None:
    renderer = with_template(template)
    with pytest.raises(BadRequest, match="chat template"):
        renderer.render_chat(chat(user("x")))


def test_the_template_s_own_words_reach_the_client() -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").render_chat(chat(user("x")))


def test_without_a_template_chats_are_refused_and_prompts_are_not() -> None:
    renderer = Renderer(TokenizerBundle(byte_bundle().tokenizer_json))
    with pytest.raises(BadRequest) as caught:
        renderer.chain(chat(user("x")), ROOT)
    assert caught.value.code == "no_chat_template"
    assert renderer.encode_request(completion("x")).tokens == [120]


def test_requests_with_tools_take_the_tool_template() -> None:
    bundle = TokenizerBundle(byte_bundle().tokenizer_json, "plain", tool_template="tools")
    renderer = Renderer(bundle)
    assert renderer.render_chat(chat(user("x"))) == "plain"
    assert renderer.render_chat(chat(user("x"), tools=[{}])) == "tools"


# --- prompts ---


def test_the_forms_of_prompts(renderer: Renderer) -> None:
    assert renderer.encode_request(completion("ab")).prompts == ([97, 98],)
    assert renderer.encode_request(completion([7, 8])).prompts == ([7, 8],)
    assert renderer.encode_request(completion(["a", "b"])).prompts == ([97], [98])
    assert renderer.encode_request(completion([[1], [2, 3]])).prompts == ([1], [2, 3])
    assert renderer.encode_request(completion("")).prompts == ([],)
    assert renderer.encode_request(completion([7])).text is None


def test_a_chain_of_several_prompts_counts_all_and_keys_the_first(renderer: Renderer) -> None:
    chain = renderer.chain(completion(["a" * 40, "b" * 40]), ROOT)
    assert chain.n_tokens == 80
    assert chain.keys == chain_keys(ROOT, list(b"a" * 40))


def test_token_ids_are_hashed_as_they_are(renderer: Renderer) -> None:
    ids = list(range(100, 150))
    chain = renderer.chain(completion(ids), ROOT)
    assert (chain.n_tokens, chain.token_bytes) == (50, pack_tokens(ids))
    assert chain.keys == chain_keys(ROOT, ids)
    assert renderer.chain(completion(bytes(ids).decode("latin1")), ROOT).keys != chain.keys
    assert renderer.new_text_bytes(completion(ids)) == 0


# --- what the cache saves ---


def conversation(turns: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"turn {i} " * 30} for i in range(turns)]


def test_a_new_turn_encodes_the_new_text_only(renderer: Renderer) -> None:
    seen = counted(renderer)
    history = conversation(21)
    first = renderer.chain(chat(history), ROOT)
    seen.clear()
    longer = chat([*history, {"role": "assistant", "content": "yes"}, *user("more")])
    assert renderer.new_text_bytes(longer) == len(
        "<|im_start|>assistant\nyes<|im_start|>user\nmore"
    )
    chain = renderer.chain(longer, ROOT)
    assert seen == ["<|im_start|>assistant\nyes", "<|im_start|>user\nmore"]
    assert renderer.new_text_bytes(longer) == 0
    shared = (first.n_tokens - len("assistant\n") - 1) // 16
    assert chain.keys[:shared] == first.keys[:shared]
    fresh = Renderer(byte_bundle())
    assert chain == fresh.chain(longer, ROOT)


def test_scopes_share_tokens_and_no_keys(renderer: Renderer) -> None:
    request = chat(conversation(4))
    one = renderer.chain(request, ROOT)
    seen = counted(renderer)
    other = renderer.chain(request, Scope("m", "t", salt="x").root(b"key"))
    assert seen == []
    assert one.token_bytes == other.token_bytes
    assert not set(one.keys) & set(other.keys)


def test_what_was_encoded_under_one_salt_takes_its_time_under_another(renderer: Renderer) -> None:
    """Or a tenant could tell by its answers' times which texts another one has sent."""
    history = conversation(4)
    sent = [chat(history), chat(history, cache_salt="a"), chat(history, cache_salt="b")]
    everything, chains = [], []
    for request in sent:
        assert renderer.new_text_bytes(request) > 4 * len("turn 0 " * 30)
        seen = counted(renderer)
        chains.append(renderer.chain(request, ROOT))
        everything.append(list(seen))
        assert renderer.new_text_bytes(request) == 0
        renderer.encode_request(request)
        assert seen == everything[-1], "once"
    assert everything[0] == everything[1] == everything[2] != []
    assert chains[0] == chains[1] == chains[2], "the time differs, not the result"
    assert renderer.stats().cache.nodes == 3 * len(everything[0]), "nor is their hashing shared"


def test_of_a_text_without_a_request_nothing_is_remembered(renderer: Renderer) -> None:
    """Nobody says whose it is, so another one's must take its time."""
    history = conversation(4)
    renderer.chain(chat(history), ROOT)
    text, before = renderer.render_chat(chat(history)), renderer.stats().cache
    seen = counted(renderer)
    tokens = renderer.encode_text(text, add_special_tokens=False)
    assert tokens == renderer.encode_text(text, add_special_tokens=False)
    assert seen == [text, text]
    assert renderer.stats().cache == before
    assert tokens == Renderer(byte_bundle()).encode_request(chat(history)).tokens


def test_a_request_is_rendered_once(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    request = chat(conversation(3))
    renderer.new_text_bytes(request)
    monkeypatch.setattr(renderer, "render_chat", lambda _request: pytest.fail("rendered again"))
    renderer.chain(request, ROOT)
    renderer.encode_request(request)


def test_a_small_cache_forgets_and_stays_right() -> None:
    renderer = Renderer(byte_bundle(), cache_bytes=20_000)
    for turns in (1, 9, 3, 15, 5, 15):
        request = chat(conversation(turns))
        chain = renderer.chain(request, ROOT)
        tokens = list(unpack_tokens(chain.token_bytes))
        assert tokens == Renderer(byte_bundle()).encode_request(request).tokens
        assert chain.keys == chain_keys(ROOT, tokens)
        assert renderer.stats().cache.bytes <= 20_000


def test_a_cache_without_memory_works() -> None:
    renderer = Renderer(byte_bundle(), cache_bytes=0)
    request = chat(conversation(3))
    assert renderer.chain(request, ROOT) == Renderer(byte_bundle()).chain(request, ROOT)
    assert renderer.stats().cache.bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such memory")
def test_a_long_piece_is_encoded_by_one_of_several_processes() -> None:
    fd = make_area_file(2, 1 << 20)
    views = [ShownPieces(fd, number, 2, b"secret") for number in range(2)]
    os.close(fd)
    first, second = (Renderer(byte_bundle(), shown=view) for view in views)
    seen = [counted(first), counted(second)]
    for text, again in (("é long " * LONG_ENOUGH, False), ("short", True)):
        request = chat(user(text))
        expected = Renderer(byte_bundle()).chain(request, ROOT)
        assert first.chain(request, ROOT) == second.chain(request, ROOT) == expected
        assert [any(text in piece for piece in each) for each in seen] == [True, again]
        second.chain(chat(user(text), cache_salt="a"), ROOT)
        assert any(text in piece for piece in seen[1]), "not for those of another salt"


def test_threads_agree(renderer: Renderer) -> None:
    requests = [chat(conversation(n)) for n in range(1, 30)]
    expected = [Renderer(byte_bundle()).chain(request, ROOT) for request in requests]
    wrong: list[int] = []

    def work(order: list[int]) -> None:
        wrong.extend(i for i in order if renderer.chain(requests[i], ROOT) != expected[i])

    orders = [list(range(29)), list(range(28, -1, -1)), [*range(0, 29, 2), *range(1, 29, 2)]]
    threads = [threading.Thread(target=work, args=(order * 3,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_other_threads_run_while_a_long_text_is_encoded(renderer: Renderer) -> None:
    request = completion("some words, and more. " * 60_000)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (renderer.chain(request, ROOT), done.set()))
    steps = 0
    thread.start()
    while not done.is_set():
        steps += 1
        done.wait(0.001)
    thread.join()
    assert steps > 20


# --- text-block mode ---


def test_text_blocks_grow_with_the_chat() -> None:
    chain = TextChain()
    short = chain.chain(chat(conversation(4)), ROOT)
    long = chain.chain(chat(conversation(6)), ROOT)
    assert short.n_tokens == 0
    assert len(short.keys) > 10
    assert long.keys[: len(short.keys)] == short.keys
    other = conversation(4)
    other[0]["role"] = "system"
    assert chain.chain(chat(other), ROOT).keys[0] != short.keys[0]
    assert not chain.takes_long(chat(other), 0)


@pytest.mark.parametrize("skip", [False, True])
def test_many_tokens_become_the_text_that_few_become(skip: bool) -> None:
    renderer = Renderer(byte_bundle())
    tokens = [*"ab\u00e9".encode(), 257]
    few = renderer.decode(tokens, skip_special_tokens=skip)
    assert renderer.decode(tokens * 3000, skip_special_tokens=skip) == few * 3000


@pytest.mark.parametrize("prompt", ["x" * 200, ["x" * 200, "y"], [65] * 60, [[65] * 60, [1]]])
def test_text_blocks_of_prompts(prompt: object) -> None:
    chain = TextChain().chain(completion(prompt), ROOT)
    assert len(chain.keys) == 3
