"""Text while it arrives: whole characters, nothing past a stop string, the same however grouped."""

from __future__ import annotations

import random

import pytest
from enginerig import decode
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from worker.detokenise import MAX_PENDING_TOKENS, REPLACEMENT, AnswerText, Detokenizer, StopMatcher
from worker.tokentext import TokenText

TEXTS = [
    "plain",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 😀",
    "é",
    "a\N{REPLACEMENT CHARACTER}b",
    "",
]


def one_by_one(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_come_out_as_whole_characters(text: str) -> None:
    pieces = one_by_one(Detokenizer(decode), list(text.encode()))
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(st.text(max_size=30), st.data())
def test_any_grouping_gives_the_same_text(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    detokenizer = Detokenizer(decode)
    out = ""
    while ids:
        n = data.draw(st.integers(1, len(ids)))
        out += detokenizer.push(ids[:n])
        assert text.startswith(out)
        ids = ids[n:]
    assert out + detokenizer.finish() == text


@given(st.binary(max_size=60))
def test_bytes_that_are_no_text_come_out_too(data: bytes) -> None:
    assert "".join(one_by_one(Detokenizer(decode), list(data))) == data.decode(errors="replace")


def test_settled_characters_do_not_wait_for_an_unfinished_one() -> None:
    parts = ["日本".encode()[:4], "日本".encode()[4:] + "語".encode()[:1], "語".encode()[1:]]
    vocabulary = dict(enumerate(parts))

    def joined(ids: list[int]) -> str:
        return b"".join(vocabulary[token] for token in ids).decode(errors="replace")

    detokenizer = Detokenizer(joined)
    assert [detokenizer.push([token]) for token in range(3)] == ["日", "本", "語"]


def test_an_unfinished_character_at_the_end_is_given_out_as_replacement() -> None:
    detokenizer = Detokenizer(decode)
    assert detokenizer.push(list("aé".encode()[:2])) == "a"
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_endless_garbage_is_not_kept_back_for_ever() -> None:
    calls: list[int] = []

    def counted(ids: list[int]) -> str:
        calls.append(len(ids))
        return decode(ids)

    detokenizer = Detokenizer(counted)
    out = "".join(detokenizer.push([0x80]) for _ in range(4 * MAX_PENDING_TOKENS))
    assert len(out) >= 3 * MAX_PENDING_TOKENS
    assert max(calls) <= 2 * MAX_PENDING_TOKENS + 2


def test_an_answer_keeps_the_space_it_begins_with() -> None:
    vocabulary = ["▁Hello", "▁world", "▁again", "!"]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(vocabulary)}, "!"))
    tokenizer.decoder = decoders.Metaspace()
    assert one_by_one(Detokenizer(tokenizer.decode, [0]), [1, 2, 3]) == [
        " world",
        " again",
        "!",
        "",
    ]
    assert "".join(one_by_one(Detokenizer(tokenizer.decode), [1, 2, 3])) == "world again!"


def test_byte_fallback_characters_one_after_the_other() -> None:
    raw = "😀é日".encode()
    names = [f"<0x{byte:02X}>" for byte in sorted(set(raw))]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = [names.index(f"<0x{byte:02X}>") for byte in raw]
    pieces = one_by_one(Detokenizer(tokenizer.decode), ids)
    assert [piece for piece in pieces if piece] == ["😀", "é", "日"]


def test_a_prompt_cut_inside_a_character_does_not_spoil_the_answer() -> None:
    rest, text = "é".encode()[1:], " ok"
    pieces = one_by_one(
        Detokenizer(decode, list(b"caf" + "é".encode()[:1])), [*rest, *text.encode()]
    )
    assert "".join(pieces).endswith(" ok")


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stop"),
    [
        (("STOP",), "abSTOPcd", "ab", "STOP"),
        (("STOP",), "abSTOcd", "abSTOcd", None),
        (("STOP",), "abSTO", "abSTO", None),
        (("aab",), "aaab", "a", "aab"),
        (("abcabd",), "abcabcabd", "abc", "abcabd"),
        (("bc", "abcd"), "xabcd", "xa", "bc"),
        (("bc", "abc"), "xabc", "x", "abc"),
        (("\n\n",), "a\nb\n\nc", "a\nb", "\n\n"),
        (("é",), "café!", "caf", "é"),
        ((), "anything", "anything", None),
    ],
)
def test_stop_strings_in_any_grouping(
    stops: tuple[str, ...], text: str, expected: str, stop: str | None
) -> None:
    rng = random.Random(0)
    for _ in range(30):
        matcher, out, found, rest = StopMatcher(stops), "", None, text
        while rest and found is None:
            n = rng.randint(1, len(rest))
            piece = matcher.push(rest[:n])
            out, found, rest = out + piece.text, piece.stop, rest[n:]
            assert expected.startswith(out)
        if found is None:
            out += matcher.finish()
        assert (out, found) == (expected, stop)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab"))
def test_what_is_given_out_never_contains_or_begins_a_stop_string(
    stops: list[str], text: str
) -> None:
    matcher, out = StopMatcher(stops), ""
    for letter in text:
        piece = matcher.push(letter)
        out += piece.text
        assert not any(stop in out for stop in stops)
        if piece.stop is not None:
            assert text.startswith(out + piece.stop)
            return
    assert not any(stop in text for stop in stops)
    assert out + matcher.finish() == text


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


def test_stop_strings_count_only_after_min_tokens() -> None:
    text = AnswerText(Detokenizer(decode), ("ab",), min_tokens=4)
    pieces = [text.push(token, count + 1) for count, token in enumerate(b"abxabz")]
    assert [piece.text for piece in pieces[:3]] == ["a", "b", "x"]
    assert pieces[4].stop == "ab"
    assert "".join(piece.text for piece in pieces[:5]) == "abx"


def test_what_is_held_back_comes_at_the_end() -> None:
    text = AnswerText(Detokenizer(decode), ("abc",), min_tokens=0)
    assert [text.push(token, 1).text for token in b"xab"] == ["x", "", ""]
    assert text.finish().text == "ab"


def fallback_tokenizer() -> tuple[Tokenizer, list[str]]:
    """Words with a blank in front, and bytes for the rest, as SentencePiece has them."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["<unk>", "</s>", "\u2581", "\u2581the", "ing", "\u4f60", "\N{REPLACEMENT CHARACTER}"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer, pieces


FALLBACK, PIECES = fallback_tokenizer()
FALLBACK_TEXT = TokenText(FALLBACK)


@given(
    st.lists(
        st.integers(0, len(PIECES) - 1) | st.sampled_from([*"\u00e9\U0001f680".encode(), 0x65]),
        max_size=24,
    ),
    st.integers(0, 6),
)
def test_fallback_bytes_break_only_themselves(ids: list[int], n_prompt: int) -> None:
    prompt, answer = ids[:n_prompt], ids[n_prompt:]
    pieces = one_by_one(Detokenizer(FALLBACK_TEXT.decode, prompt), answer)
    data = b"".join(map(FALLBACK_TEXT.bytes_of, answer))
    expected = data.decode(errors="replace")
    # A character that the prompt began cannot be joined with it, and a first blank may be left out.
    said = "".join(pieces)
    if not prompt:
        assert said in (expected, expected.removeprefix(" "))
    assert said.replace(REPLACEMENT, "").strip() == expected.replace(REPLACEMENT, "").strip()
