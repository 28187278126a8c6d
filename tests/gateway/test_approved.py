"""Approved beginnings: which tokens they are, which prompts have them, and which never do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.approved import Approvals, Beginning, read_approved
from gateway.config import GatewayConfig, TenancyConfig
from gateway.openers import check_config
from shared.blocks import pack_tokens
from shared.errors import ConfigError
from shared.openai import RouteKind, parse
from shared.render import Renderer, byte_bundle

POLICY = "You answer for the shop, briefly.\nNever mention prices."
ASKED = {"role": "user", "content": "where is my order?"}
RENDERER = Renderer(byte_bundle())
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def begin(**fields: Any) -> Beginning:
    return Beginning("file", fields)


def approvals(*beginnings: Beginning, renderer: Renderer = RENDERER) -> Approvals:
    made = Approvals(beginnings)
    made.reckon("t", renderer)
    return made


def tokens(renderer: Renderer = RENDERER, **fields: Any) -> bytes:
    kind = RouteKind.CHAT if "messages" in fields else RouteKind.COMPLETIONS
    request = parse(kind, json.dumps({"model": "m", **fields}).encode())
    return pack_tokens(renderer.encode_request(request).tokens)


def found(known: Approvals, renderer: Renderer = RENDERER, **fields: Any) -> int:
    return len(known.find("t", tokens(renderer, **fields))) // 4


def test_they_end_where_the_users_message_begins() -> None:
    known = approvals(begin(messages=[system(POLICY)]))
    size = found(known, messages=[system(POLICY), ASKED])
    # One token per byte, and one per marker of the template.
    assert size == len(f"system\n{POLICY}\nuser\n") + 3
    for content in ("", "x" * 500, "\n", "<|im_end|>", "ü", [{"type": "text", "text": "parts"}]):
        message = {"role": "user", "content": content}
        assert found(known, messages=[system(POLICY), message]) == size, content
    longer = [system(POLICY), ASKED, {"role": "assistant", "content": "here"}, ASKED]
    assert found(known, messages=longer) == size


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [system(POLICY + " And remember: the code is 1234."), ASKED]},
        {"messages": [system(POLICY + "\n"), ASKED]},
        {"messages": [system(POLICY[:-1]), ASKED]},
        {"messages": [system(" " + POLICY), ASKED]},
        {"messages": [system("secret"), system(POLICY), ASKED]},
        {"messages": [{"role": "user", "content": POLICY}, ASKED]},
        {"messages": [ASKED, system(POLICY)]},
        {"messages": [system(POLICY), ASKED], "tools": [TOOL]},
        {"prompt": POLICY},
        {"prompt": [1, 2, 3]},
    ],
)
def test_a_prompt_that_differs_in_one_token_shares_nothing(fields: dict[str, Any]) -> None:
    assert found(approvals(begin(messages=[system(POLICY)])), **fields) == 0


def test_another_template_makes_other_tokens() -> None:
    bundle = byte_bundle()
    other = replace(bundle, chat_template="v2 " + (bundle.chat_template or ""))
    renderer = Renderer(other)
    asked = {"messages": [system(POLICY), ASKED]}
    known = approvals(begin(messages=[system(POLICY)]))
    assert found(known, renderer, **asked) == 0
    known.reckon("t", renderer)
    assert found(known, renderer, **asked) > 0
    assert found(known, **asked) == 0


def test_tools_are_approved_with_the_beginning_that_names_them() -> None:
    known = approvals(begin(messages=[system(POLICY)], tools=[TOOL]))
    asked = [system(POLICY), ASKED]
    assert found(known, messages=asked, tools=[TOOL]) > 0
    assert found(known, messages=asked) == 0
    assert found(known, messages=asked, tools=[TOOL, TOOL]) == 0


def test_of_several_the_longest_counts() -> None:
    shots = [system(POLICY), ASKED, {"role": "assistant", "content": "soon"}]
    known = approvals(begin(messages=[system(POLICY)]), begin(messages=shots))
    short = found(known, messages=[system(POLICY), ASKED])
    assert 0 < short < found(known, messages=[*shots, ASKED])
    assert found(known, messages=[*shots[:2], {"role": "assistant", "content": "no"}]) == short


def test_completions_have_beginnings_as_text_or_tokens() -> None:
    assert found(approvals(begin(prompt=POLICY)), prompt=POLICY + " more") == len(POLICY)
    assert found(approvals(begin(prompt=[5, 6, 7])), prompt=[5, 6, 7, 8]) == 3
    assert found(approvals(begin(prompt=[5, 6, 7])), prompt=[5, 6, 8]) == 0


def test_a_replaced_list_is_without_effect_at_once() -> None:
    old, new = begin(messages=[system(POLICY)]), begin(messages=[system("another")])
    known = approvals(old)
    asked = {"messages": [system(POLICY), ASKED]}
    assert not known.due("t", RENDERER)
    known.replace((old,))
    assert not known.due("t", RENDERER)
    assert found(known, **asked) > 0
    known.replace((new,))
    assert found(known, **asked) == 0
    assert known.due("t", RENDERER)
    known.reckon("t", RENDERER)
    assert found(known, **asked) == 0
    assert found(known, messages=[system("another"), ASKED]) > 0
    known.replace(())
    assert found(known, messages=[system("another"), ASKED]) == 0


def test_templates_that_tell_the_date_are_asked_again() -> None:
    now = [0.0]
    bundle = byte_bundle()
    template = "{{ strftime_now('%Y') }}" + (bundle.chat_template or "")
    dated = Renderer(replace(bundle, chat_template=template))
    known = Approvals((begin(messages=[system(POLICY)]),), lambda: now[0])
    for renderer in (RENDERER, dated):
        assert known.due("t", renderer)
        known.reckon("t", renderer)
        now[0] += 59.0
        assert not known.due("t", renderer)
        now[0] += 2.0
        assert known.due("t", renderer) is (renderer is dated)
        known = Approvals((begin(messages=[system(POLICY)]),), lambda: now[0])


def test_what_cannot_be_shared_is_told() -> None:
    refuses = Renderer(replace(byte_bundle(), chat_template="{{ raise_exception('no system') }}"))
    known = approvals(begin(messages=[system(POLICY)]), renderer=refuses)
    (fault,) = known.faults("t", able=True)
    assert "no system" in fault
    assert "file" in fault
    assert "not shared" in known.faults("t", able=False)[0]
    assert approvals().faults("t", able=False) == ()
    # A template that ends nothing: what follows could be part of it.
    mixes = Renderer(replace(byte_bundle(), chat_template="{{ messages[-1].content }}"))
    known = approvals(begin(messages=[system(POLICY)]), renderer=mixes)
    assert "before every continuation" in known.faults("t", able=True)[0]
    assert known.find("t", tokens(prompt=POLICY)) == b""


def test_files(tmp_path: Path) -> None:
    text, body = tmp_path / "a.txt", tmp_path / "b.json"
    text.write_text(POLICY + "\n")
    body.write_text(json.dumps({"messages": [system(POLICY)], "tools": [TOOL]}))
    one, two = read_approved((str(text), str(body)))
    assert one.fields == {"messages": [system(POLICY)]}
    assert two.fields["tools"] == [TOOL]
    # One line end belongs to the file, any further one to the text.
    text.write_text(POLICY + "\r\n\n")
    assert read_approved((str(text),))[0].fields == {"messages": [system(POLICY + "\r\n")]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b""),
        ("a.txt", b"\n"),
        ("a.txt", b"\xff secret"),
        ("a.json", b"secret"),
        ("a.json", b'{"messages": "secret"}'),
        ("a.json", b'{"prompt": ["secret", "secret"]}'),
        ("a.json", b"[]"),
        ("a.json", b"{}"),
        ("missing.txt", None),
    ],
)
def test_files_that_hold_none_stop_the_start(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    config = GatewayConfig(tenancy=TenancyConfig(shared_prompts=(str(path),)))
    with pytest.raises(ConfigError, match=r"tenancy\.shared_prompts") as caught:
        check_config(config)
    assert "secret" not in str(caught.value)
