"""Grammars compiled by llguidance. The only module that knows the library.

It is imported when the first grammar is asked for. Compiling is meant for a thread other than the
event loop's and the engine's; what it yields is used on the engine thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from shared.errors import BadRequest
from worker import lark
from worker.guide import Grammar, GrammarSpec, Guide
from worker.keptgrammars import KeptGrammars

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE = 1 << 20
"""Characters of the largest grammar."""
MESSAGE_CHARS = 300
DEAD_END = "NoExtensionBias"
"""The library's word for a place where no token may follow."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe.

    :param tokenizer_json: the tokenizer, in the form of a ``tokenizer.json``.
    :param tokens: how many ids model and tokenizer have; the larger number.
    :param eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer_json: str, tokens: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._tokens = tokens
        self._eos = tuple(sorted(eos_token_ids))
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept = KeptGrammars()

    def compile(self, spec: GrammarSpec, salt: str = "") -> Grammar:
        """Takes milliseconds, a second at the first time. Raises ``BadRequest`` with the reason.

        :param salt: whose grammar it is. Another one's takes its time: what is remembered of it
            would tell that it was sent.
        """
        source = (spec.kind, spec.source)
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._open_tokenizer(spec.param)
            kept = self._kept.find(salt, source)
            if kept is not None:
                return kept
        grammar = LlGrammar(_matcher(tokenizer, spec), self._eos)
        with self._lock:
            self._kept.keep(salt, source, grammar)
        return grammar

    def _open_tokenizer(self, param: str) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise BadRequest(
                f"'{param}' needs the package 'llguidance' on the worker: install "
                "headwater[worker].",
                param=param,
            ) from None
        try:
            return LLTokenizer(
                self._tokenizer_json, n_vocab=self._tokens, eos_token=list(self._eos) or None
            )
        except ValueError as error:
            raise BadRequest(
                f"'{param}' is not supported with this model's tokenizer: {_short(str(error))}",
                param=param,
            ) from None


def _matcher(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """The library's form of a grammar. Raises ``BadRequest`` if it cannot be followed."""
    from llguidance import LLMatcher, LLParserLimits, regex_to_lark

    if len(spec.source) > MAX_SOURCE:
        raise BadRequest(
            f"'{spec.param}' is larger than {MAX_SOURCE} characters.", param=spec.param
        )
    if spec.kind == "json":
        rules = f"start: {lark.json_of(msgspec.json.decode(spec.source))}"
    elif spec.kind == "regex":
        rules = f"start: /{regex_to_lark(spec.source)}/"
    else:
        rules = spec.source
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, f"{lark.OPTIONS}\n{rules}", log_level=0, limits=limits)
    beginning = matcher.deep_copy()
    if not matcher.is_error():
        beginning.compute_bitmask()  # shows what no text at all fulfils
    if beginning.is_error():
        why = beginning.get_error()
        why = "no answer at all fulfils it" if DEAD_END in why else _short(why)
        raise BadRequest(f"'{spec.param}' cannot be enforced: {why}", param=spec.param)
    return matcher


def _short(message: str) -> str:
    return " ".join(message.split("\n<state>", maxsplit=1)[0].split())[:MESSAGE_CHARS]


class LlGrammar:
    """``worker.guide.Grammar``."""

    def __init__(self, matcher: LLMatcher, eos: tuple[int, ...]) -> None:
        self._matcher, self._eos = matcher, eos

    def start(self) -> Guide:
        """A guide at the beginning; copies a few pointers."""
        return _LlGuide(self._matcher.deep_copy(), self._eos)


class _LlGuide:
    """``worker.guide.Guide``."""

    def __init__(self, matcher: LLMatcher, eos: tuple[int, ...]) -> None:
        self._matcher, self._eos = matcher, eos
        self._ended = False
        self._error: str | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more may follow."""
        return self._ended

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further."""
        return self._error

    def allowed(self) -> bytes:
        """One bit per token. The library names one end token; the model may choose any of its."""
        mask = self._matcher.compute_bitmask()
        if not any(mask[end // 8] >> end % 8 & 1 for end in self._eos):
            return mask
        wider = bytearray(mask)
        for end in self._eos:
            wider[end // 8] |= 1 << end % 8
        return bytes(wider)

    def advance(self, token: int) -> None:
        """Take in a token. A limit that was hit while the mask was made shows here as well."""
        matcher = self._matcher
        if not matcher.is_error() and token in self._eos and matcher.is_accepting():
            self._ended = True
            return
        if matcher.is_error() or not matcher.consume_token(token):
            self._error = f"the grammar cannot be followed: {_short(matcher.get_error())}"
            return
        self._ended = matcher.is_stopped()
