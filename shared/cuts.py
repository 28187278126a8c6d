"""Where a text may be cut so that the tokens of its pieces are the tokens of the whole.

A tokenizer finds its added tokens first and encodes what lies between them piece by piece. So a
cut right *before* an added token is harmless if that token matches the raw text (not normalized),
takes no neighbouring white space (lstrip, rstrip) and needs no word boundary (single_word). Cutting
before and not after it means that no piece but the first begins with plain text, which dummy
prefixes (Metaspace "first") depend on.

That is the theory; each token is used only after it has been *proved* against full encodes on
random and nasty texts, with a fixed seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import AddedToken, Tokenizer

MAX_CANDIDATES = 32
"""Tokens that are proved: those the template writes come first."""
TEXTS_PER_TOKEN = 4
TEXTS_TOGETHER = 16
_SEED = 20_240_917

_NASTY = (
    *("", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u200d", "\u0301", "\ufeff", "\x00"),
    *("a", "A b", "hello world", "It's", "n't", "  indented", "trailing  ", "1234567", "3.14e-10"),
    *("é", "e\u0301", "ﬁ", "Ａ", "你好，世界", "日本語", "🌍", "👩\u200d👩\u200d👧", "🇩🇪"),
    *("العربية", "नमस्ते", "한국어", "▁", "▁▁x", "##ing", "Ġ", "Ċ", "<0x0A>", "-----", "..."),
    *("<", "<|", "|>", "<|im_", "im_end|>", "</s", "[INST", "def f(x):\n    return x\n"),
    *('{"a": [1, 2]}', "http://x.y/?z=1&w=2", "a\n\n b"),
)


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts a text before each proven token."""

    pattern: re.Pattern[str] | None
    """All added tokens matched in raw text, longest first; None if nothing was proved."""
    proven: frozenset[str]

    def cut(self, text: str) -> list[str]:
        """The pieces in order; joined they are ``text``. An empty text has no piece."""
        if self.pattern is None:
            return [text] if text else []
        pieces: list[str] = []
        start = 0
        for match in self.pattern.finditer(text):
            at = match.start()
            if at > start and match.group() in self.proven:
                pieces.append(text[start:at])
                start = at
        if start < len(text):
            pieces.append(text[start:])
        return pieces


NO_CUTS = Cutter(None, frozenset())


def prove_cuts(tokenizer: Tokenizer, template_text: Sequence[str]) -> Cutter:
    """The cutter whose tokens have all been proved for this tokenizer; perhaps :data:`NO_CUTS`.

    :param template_text: what the chat template itself can write; tokens in it are tried first.
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    raw = [token.content for token in added if not token.normalized and token.content]
    if not raw:
        return NO_CUTS
    pattern = re.compile(literal_union(raw))
    written = "\0".join(template_text)
    candidates = sorted(
        (token.content for token in added if _may_cut(token, added)),
        key=lambda content: (content not in written, len(content)),
    )
    rng = Random(_SEED)
    proven = [
        content
        for content in candidates[:MAX_CANDIDATES]
        if _holds(tokenizer, Cutter(pattern, frozenset({content})), [content], rng, TEXTS_PER_TOKEN)
    ]
    cutter = Cutter(pattern, frozenset(proven))
    if not proven or not _holds(tokenizer, cutter, proven, rng, TEXTS_TOGETHER):
        return NO_CUTS
    return cutter


def same_tokens(tokenizer: Tokenizer, cutter: Cutter, text: str) -> bool:
    """Whether the pieces' tokens are the whole text's tokens."""
    joined: list[int] = []
    for piece in cutter.cut(text):
        joined += tokenizer.encode(piece, add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return joined == whole


def _may_cut(token: AddedToken, added: Iterable[AddedToken]) -> bool:
    """The rule above, on the token's flags (the proof comes after)."""
    content = token.content
    if token.normalized or token.lstrip or token.rstrip or token.single_word or not content:
        return False
    if content[0].isspace() or content[-1].isspace():
        return False  # a neighbour's lstrip or rstrip could take it
    words = any(other.single_word for other in added)
    return not words or not (content[0].isalnum() or content[0] == "_")


def _holds(
    tokenizer: Tokenizer, cutter: Cutter, tokens: Sequence[str], rng: Random, texts: int
) -> bool:
    """Compare piecewise and full encodes on nasty texts that contain ``tokens``."""
    for _ in range(texts):
        pieces: list[str] = []
        for _ in range(12):
            pieces += rng.choices(_NASTY, k=rng.randint(0, 2))
            pieces.append(rng.choice(tokens))
            if rng.random() < 0.3:
                pieces.append("".join(map(chr, rng.choices(range(0x20, 0x2FF), k=8))))
        pieces += rng.choices(_NASTY, k=2)
        if not same_tokens(tokenizer, cutter, "".join(pieces)):
            return False
    return True


def literal_union(words: Iterable[str]) -> str:
    """A regular expression for any of ``words``, the longest where several begin.

    Shared beginnings are factored out, so that thousands of added tokens cost a few comparisons at
    each place of the text instead of thousands.
    """
    return _union_from(sorted(set(words)), 0)


def _union_from(words: Sequence[str], depth: int) -> str:
    """Union of the rests of sorted ``words`` that agree in their first ``depth`` characters."""
    if len(words) == 1:
        return re.escape(words[0][depth:])
    optional = len(words[0]) == depth  # a word ends here: the longer ones are tried first
    branches: list[str] = []
    rest = words[1:] if optional else words
    start = 0
    for index in range(1, len(rest) + 1):
        if index == len(rest) or rest[index][depth] != rest[start][depth]:
            group = rest[start:index]
            shared = _shared_length(group[0], group[-1])
            branches.append(re.escape(group[0][depth:shared]) + _union_from(group, shared))
            start = index
    return f"(?:{'|'.join(branches)})" + ("?" if optional else "")


def _shared_length(first: str, last: str) -> int:
    """Length of the common beginning; of sorted words it is that of all between."""
    length = 0
    for a, b in zip(first, last, strict=False):
        if a != b:
            break
        length += 1
    return length
