"""Piecewise encoding equals full encoding, and chains grow without changing what was there."""

from __future__ import annotations

import json
from typing import Any

from depth import DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.blocks import Scope, chain_keys, unpack_tokens
from shared.cuts import prove_cuts
from shared.openai import RouteKind, parse
from shared.render import Renderer, byte_bundle

ROOT = Scope("m", "t").root(b"key")
MARKERS = [
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<a>",
    "<a><b>",
    "x<a>y",
    "\n\n",
    " <l>",
    "w",
]
PIECE = st.text(max_size=6) | st.sampled_from([*MARKERS, " ", "\n", "<", "<|im_", "e\u0301", "🌍"])
TEXT = st.lists(PIECE, max_size=12).map("".join)

FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized")}
)


def tokenizer_of(flags: list[dict[str, bool]]) -> Tokenizer:
    """A byte-level tokenizer whose added tokens have the given flags."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)} | {"ab": 256, "Ġa": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(m, **f) for m, f in zip(MARKERS, flags, strict=False)])
    return tokenizer


@settings(max_examples=60 * DEPTH, deadline=None)
@given(st.lists(FLAGS, min_size=4, max_size=len(MARKERS)), st.lists(TEXT, min_size=4, max_size=8))
def test_whatever_the_flags_pieces_have_the_tokens_of_the_whole(
    flags: list[dict[str, bool]], texts: list[str]
) -> None:
    tokenizer = tokenizer_of(flags)
    cutter = prove_cuts(tokenizer, [])
    for text in texts:
        pieces = cutter.cut(text)
        assert "".join(pieces) == text
        joined = [i for p in pieces for i in tokenizer.encode(p, add_special_tokens=False).ids]
        assert joined == tokenizer.encode(text, add_special_tokens=False).ids


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}
)


@settings(max_examples=60 * DEPTH, deadline=None)
@given(st.lists(st.lists(MESSAGE, min_size=1, max_size=6), min_size=1, max_size=6))
def test_one_renderer_for_many_chats_is_a_fresh_one_for_each(chats: list[list[Any]]) -> None:
    shared = Renderer(byte_bundle(), cache_bytes=6_000)
    for messages in chats:
        for length in range(1, len(messages) + 1):
            body = json.dumps({"messages": messages[:length]}).encode()
            request = parse(RouteKind.CHAT, body)
            text = shared.render_chat(request)
            tokens = shared.tokenizer.encode(text, add_special_tokens=False).ids
            chain = shared.chain(request, ROOT)
            assert list(unpack_tokens(chain.token_bytes)) == tokens
            assert chain.keys == chain_keys(ROOT, tokens)
