"""Where texts are cut, the proof behind it, and what happens when it does not hold."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from stepkit import calls
from structlog.testing import capture_logs
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from shared.blocks import Scope, chain_keys
from shared.bundle import TokenizerBundle
from shared.cuts import NO_CUTS, Cutter, literal_union, prove_cuts, same_tokens
from shared.openai import RouteKind, parse
from shared.render import Renderer, byte_bundle
from shared.segments import SegmentCache

ROOT = Scope("m", "t").root(b"key")


def words(*added: AddedToken, **parts: Any) -> Tokenizer:
    """A small character-level tokenizer with the given added tokens."""
    letters = [chr(c) for c in range(0x20, 0x7F)] + ["▁", "\n", "é", "E", "<unk>"]
    vocab = {letter: index for index, letter in enumerate(dict.fromkeys(letters))}
    merges = [("a", "b"), ("▁", "h")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    for name, value in parts.items():
        setattr(tokenizer, name, value)
    tokenizer.add_tokens(list(added))
    return tokenizer


def plain(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, normalized=False, **flags)


def proven(tokenizer: Tokenizer) -> set[str]:
    return set(prove_cuts(tokenizer, []).proven)


def test_the_byte_tokenizer_is_cut_at_its_markers() -> None:
    renderer = Renderer(byte_bundle())
    cutter = prove_cuts(renderer.tokenizer, [])
    assert cutter.proven == {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    text = "a<|im_start|>b<|im_<|im_end|><|im_end|>\n"
    assert cutter.cut(text) == ["a", "<|im_start|>b<|im_", "<|im_end|>", "<|im_end|>\n"]
    assert cutter.cut("") == []
    assert cutter.cut("<|im_end|>") == ["<|im_end|>"]


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_tokens_that_take_from_their_surroundings_are_no_cuts(flags: dict[str, bool]) -> None:
    assert proven(words(plain("<x>", **flags), plain("<y>"))) == {"<y>"}


def test_normalized_and_blank_tokens_are_no_cuts() -> None:
    tokenizer = words(AddedToken("<n>", normalized=True), plain("\n\n"), plain(" s"), plain("<y>"))
    assert proven(tokenizer) == {"<y>"}


def test_word_like_tokens_are_no_cuts_beside_single_word_tokens() -> None:
    assert proven(words(plain("sep"))) == {"sep"}
    assert proven(words(plain("sep"), plain("<w>", single_word=True))) == set()


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_dummy_prefixes_of_each_kind(scheme: str) -> None:
    split = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer = words(plain("<s>"), plain("</s>"), pre_tokenizer=split)
    cutter = prove_cuts(tokenizer, [])
    assert cutter.proven == {"<s>", "</s>"}
    for text in ("hi<s>hi</s> hi", "<s>hi", " hi</s>", "</s></s>h"):
        assert same_tokens(tokenizer, cutter, text)


def test_a_normalizer_that_prepends() -> None:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer = words(plain("</s>"), normalizer=normalizers.Sequence(steps))
    assert proven(tokenizer) == {"</s>"}


class Contextual:
    """A tokenizer whose tokens after a marker depend on what stands before it."""

    def __init__(self, real: Tokenizer) -> None:
        self._real = real

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self._real.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return self._real.encode(text.replace("<y>a", "<y>b", text.count("<y>") - 1))


def test_the_proof_finds_a_tokenizer_that_breaks_the_rule() -> None:
    assert prove_cuts(Contextual(words(plain("<y>"))), []) is NO_CUTS  # type: ignore[arg-type]


def test_without_added_tokens_there_are_no_cuts() -> None:
    assert prove_cuts(words(), []) is NO_CUTS
    assert NO_CUTS.cut("<y>a<y>") == ["<y>a<y>"]


def test_longer_tokens_win_over_their_beginnings() -> None:
    tokenizer = words(plain("<a>"), plain("<a><b>"), plain("<b>", lstrip=True))
    cutter = prove_cuts(tokenizer, [])
    assert cutter.proven == {"<a>", "<a><b>"}
    assert cutter.cut("x<a><b>y<a>z<b>") == ["x", "<a><b>y", "<a>z<b>"]


def test_a_token_inside_another_is_never_cut_out() -> None:
    tokenizer = words(plain("<a>"), plain("x<a>y", lstrip=True))
    cutter = prove_cuts(tokenizer, [])
    assert cutter.proven == {"<a>"}
    assert cutter.cut("1x<a>y2<a>3") == ["1x<a>y2", "<a>3"]
    assert same_tokens(tokenizer, cutter, "1 x<a>y2<a>3")


def test_tokens_of_the_template_are_proved_first_and_the_number_is_bounded() -> None:
    tokenizer = words(*(plain(f"<r{i}>") for i in range(1000)), plain("<the-one-in-the-template>"))
    cutter = prove_cuts(tokenizer, ["a <the-one-in-the-template> b"])
    made = calls(lambda: prove_cuts(tokenizer, ["a <the-one-in-the-template> b"]))
    assert made < 3_000_000, "of a thousand tokens, each against few others"
    assert "<the-one-in-the-template>" in cutter.proven
    assert len(cutter.proven) == 32


def test_the_proof_is_the_same_each_time() -> None:
    tokenizer = words(plain("<x>"), plain("<y>"))
    assert prove_cuts(tokenizer, []) == prove_cuts(tokenizer, [])


def test_the_union_matches_the_longest_word() -> None:
    many = [f"<|reserved_{i}|>" for i in range(300)] + ["<|", "<|re", "é", "a.b", "a", "\n", "\n\n"]
    union = re.compile(literal_union(many))
    for word in many:
        assert union.fullmatch(word)
    assert union.match("<|reserved_30|>").group() == "<|reserved_30|>"  # type: ignore[union-attr]
    assert union.match("<|reserve").group() == "<|re"  # type: ignore[union-attr]
    assert union.match("axb").group() == "a"  # type: ignore[union-attr]
    assert union.match("<x") is None


# --- live checks ---


def chat(text: str) -> Any:
    body = {"messages": [{"role": "user", "content": text}]}
    return parse(RouteKind.CHAT, json.dumps(body).encode())


def test_a_difference_in_a_live_check_turns_the_cuts_off() -> None:
    renderer = Renderer(byte_bundle(), check_every=2, background=lambda work: work())
    request = chat("a" * 100)
    right = renderer.chain(request, ROOT)
    renderer._cache.clear()
    renderer._cache.add("<|im_end|>\n", b"\1\0\0\0")  # a wrong memory
    with capture_logs() as logs:
        assert renderer.chain(request, ROOT) != right
    assert [entry["event"] for entry in logs] == ["segment_cache_off"]
    assert "aaa" not in str(logs)
    stats = renderer.stats()
    assert (stats.cutting, stats.checks, stats.mismatches) == (False, 1, 1)
    assert stats.cache.segments == 0
    assert renderer.chain(chat("a" * 100), ROOT) == right
    assert renderer.stats().cache.segments == 1


def test_plain_prompts_are_checked_with_their_ends() -> None:
    bundle = byte_bundle()
    bundle = TokenizerBundle(bundle.tokenizer_json, bos_token="<|endoftext|>", add_bos=True)
    renderer = Renderer(bundle, check_every=1, background=lambda work: work())
    body = json.dumps({"prompt": "a<|im_end|>b"}).encode()
    tokens = renderer.encode_request(parse(RouteKind.COMPLETIONS, body)).tokens
    assert tokens == [258, 97, 257, 98]
    assert (renderer.stats().checks, renderer.stats().mismatches) == (1, 0)


def test_one_in_so_many_is_checked_and_never_two_at_once() -> None:
    waiting: list[Callable[[], None]] = []
    renderer = Renderer(byte_bundle(), check_every=3, background=waiting.append)
    for index in range(12):
        renderer.chain(chat(f"text {index}"), ROOT)
    assert len(waiting) == 1
    waiting.pop()()
    assert renderer.stats().checks == 1
    for index in range(3):
        renderer.chain(chat(f"text {index}"), ROOT)
    assert len(waiting) == 1
    assert renderer.stats().mismatches == 0


def test_by_default_a_check_runs_beside_the_request() -> None:
    renderer = Renderer(byte_bundle(), check_every=1)
    renderer.chain(chat("x"), ROOT)
    for thread in threading.enumerate():
        if thread.name == "headwater-check":
            thread.join(10)
    assert renderer.stats().checks == 1


# --- the cache itself ---


def test_chains_of_a_forgotten_parent_are_made_anew() -> None:
    cache = SegmentCache(100_000)
    segments = [cache.add(str(i), bytes([i]) * 4 * 20) for i in range(6)]
    tokens = [int.from_bytes(bytes([i]) * 4, "little") for i in range(6) for _ in range(20)]
    for size in (6, 2, 6, 4):
        assert cache.chain(ROOT, segments[:size]) == chain_keys(ROOT, tokens[: size * 20])
    cache.clear()
    assert cache.stats().nodes == 0
    assert cache.chain(ROOT, segments) == chain_keys(ROOT, tokens)


def test_the_least_recently_used_goes_first() -> None:
    cache = SegmentCache(4_000)
    for index in range(5):
        cache.add(f"{index}", b"")
        cache.find(["0"])
    assert cache.known(["0", "1", "4"]) == [True, True, True]
    for index in range(5, 30):
        cache.add(f"{index}", b"")
        cache.find(["0"])
    assert cache.known(["0", "1", "29"]) == [True, False, True]
    assert cache.stats().bytes <= 4_000


def test_the_deepest_part_of_a_chain_goes_first() -> None:
    cache = SegmentCache(8_000)
    segments = [cache.uncached(b"\1\0\0\0" * 16) for _ in range(20)]
    cache.chain(ROOT, segments)
    held = cache.stats().nodes
    assert 0 < held < 20
    assert len(cache._walk(ROOT, segments)) == held


def test_a_chain_that_was_used_again_still_loses_its_deepest_part_first() -> None:
    cache = SegmentCache(8_000)
    granule = b"\1\0\0\0" * 16
    old, new = ([cache.uncached(granule) for _ in range(n)] for n in (5, 3))
    cache.chain(ROOT, old)
    cache.chain(ROOT, old)
    cache.chain(ROOT, new)
    left = len(cache._walk(ROOT, old))
    assert 0 < left < 5
    assert left + 3 == cache.stats().nodes


def test_hits_and_misses_are_counted() -> None:
    cache = SegmentCache(10_000)
    assert cache.find(["a"]) == [None]
    added = cache.add("a", b"")
    assert cache.add("a", b"other") is added
    assert cache.find(["a", "b"]) == [added, None]
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (1, 2)


def test_a_cutter_of_nothing_is_harmless() -> None:
    assert Cutter(re.compile("x"), frozenset()).cut("axb") == ["axb"]


def test_a_broken_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Renderer(TokenizerBundle("{}"))
    with pytest.raises(ValueError, match="chat template cannot be read"):
        Renderer(TokenizerBundle(byte_bundle().tokenizer_json, "{% if %}"))
