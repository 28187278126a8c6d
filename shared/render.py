"""Requests to token ids and index keys: one code path for gateway and worker, so that keys agree.

    render (chat template) -> cut before proven added tokens -> tokens per piece (cached) -> chain

What was encoded and hashed before is not encoded or hashed again, so a chat's next turn costs its
new text. Everything here may be called from any thread: rendering and cutting are pure, the caches
guard themselves (``shared.segments``), and encoding (which releases the interpreter lock) happens
outside of any lock. So a caller asks ``takes_long`` on its event loop and, if so, calls ``chain``
on another thread; what was rendered for the question is kept for the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

import jinja2
import structlog

from shared import chat
from shared.blocks import SaltPoint, extend_chain, pack_tokens, unpack_tokens
from shared.bulk import is_bulky
from shared.bundle import (
    BundleError,
    TokenizerBundle,
    added_ends,
    decode_bundle,
    encode_bundle,
    load_bundle,
    open_tokenizer,
)
from shared.bytetok import byte_bundle
from shared.chat import UnsupportedContent
from shared.cuts import NO_CUTS, Cutter, prove_cuts
from shared.errors import BadRequest
from shared.livecheck import Background, LiveCheck, on_own_thread
from shared.openai import GenerateRequest, RouteKind, prompts_of
from shared.segments import CacheStats, Segment, SegmentCache
from shared.shownpieces import LONG_ENOUGH, ShownPieces
from shared.template import ChatTemplate
from shared.textchain import EncodedChain, TextChain

__all__ = [
    "BundleError",
    "Encoded",
    "EncodedChain",
    "RenderStats",
    "Renderer",
    "TextChain",
    "TokenizerBundle",
    "UnsupportedContent",
    "byte_bundle",
    "decode_bundle",
    "encode_bundle",
    "load_bundle",
]

SHORT_PIECE = 4096
"""Characters up to which a piece (about a millisecond) is encoded in place."""
CHECK_EVERY = 256
"""One in so many cut requests is encoded as a whole as well, and compared."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a request; several prompts only for completions with a list."""

    prompts: tuple[list[int], ...]
    text: str | None = None
    """The rendered or given text; None for token ids or several prompts."""

    @property
    def tokens(self) -> list[int]:
        """The first prompt, which is the only one of a chat."""
        return self.prompts[0]


@dataclass(frozen=True, slots=True)
class RenderStats:
    """State of one renderer."""

    cutting: bool
    """Texts are cut and remembered in pieces; False after a failed proof or check."""
    proven: int
    """Added tokens at which texts are cut."""
    checks: int
    """Live requests that were encoded as a whole and compared."""
    mismatches: int
    cache: CacheStats


@dataclass(frozen=True, slots=True)
class _Plan:
    """A request rendered and cut: per prompt its pieces of text, or its packed token ids."""

    prompts: tuple[tuple[str, ...] | bytes, ...]
    special: bool
    cutter: Cutter
    salt: str = ""
    """Whose texts these are: nothing is remembered of them for requests of another salt."""


class Renderer:
    """Chat template and tokenizer of one bundle, with their caches.

    :param cache_bytes: memory for pieces and chains.
    :param check_every: one in so many requests is compared with a full encode.
    :param background: runs that comparison; a thread of its own if None.
    :param shown: what other processes have encoded, and where ours is shown to them.
    :raises BundleError: the tokenizer or a template cannot be read.
    """

    def __init__(
        self,
        bundle: TokenizerBundle,
        cache_bytes: int = 64 * 2**20,
        *,
        check_every: int = CHECK_EVERY,
        background: Background | None = None,
        shown: ShownPieces | None = None,
    ) -> None:
        self.bundle, self._shown = bundle, shown
        self.tokenizer = open_tokenizer(bundle)
        self._template = _read_template(bundle.chat_template)
        self._tool_template = _read_template(bundle.tool_template)
        written = self._template.literals if self._template else []
        self._cutter = prove_cuts(self.tokenizer, written)
        self._cache = SegmentCache(cache_bytes)
        self._before, self._after = (
            [self._cache.uncached(pack_tokens(tokens))] if tokens else []
            for tokens in added_ends(self.tokenizer, bundle)
        )
        self._plans: WeakKeyDictionary[GenerateRequest, _Plan] = WeakKeyDictionary()
        self._plans_lock = threading.Lock()
        self._check = LiveCheck(check_every, background or on_own_thread)
        self._log = structlog.get_logger("headwater.render")

    # --- text and tokens ---

    def render_chat(self, request: GenerateRequest) -> str:
        """The text of a chat; raises :class:`BadRequest` if the template refuses it."""
        template = self._template
        if request.tools is not None and self._tool_template is not None:
            template = self._tool_template
        if template is None:
            raise BadRequest(
                "This model has no chat template; use /v1/completions.", code="no_chat_template"
            )
        return chat.render(template, request, self.bundle.variables)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the tokenizer's BOS and the like if asked for.

        Nothing is remembered of it, nor looked up: nobody says whose text it is.
        """
        return list(unpack_tokens(self._whole(text, special=add_special_tokens)))

    def encode_request(self, request: GenerateRequest) -> Encoded:
        """Token ids of every prompt of a request."""
        plan = self._plan(request)
        packed = [self._tokens(plan, prompt) for prompt in plan.prompts]
        self._sample(plan, packed[0])
        prompts = tuple(list(unpack_tokens(tokens)) for tokens in packed)
        first = plan.prompts[0]
        single = len(plan.prompts) == 1 and not isinstance(first, bytes)
        return Encoded(prompts, "".join(map(str, first)) if single else None)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; broken UTF-8 shows as U+FFFD."""
        if len(tokens) <= SHORT_PIECE:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))
        # As in _encode: only the batch form lets other threads run.
        (text,) = self.tokenizer.decode_batch([tokens], skip_special_tokens=skip_special_tokens)
        return str(text)

    # --- chains ---

    def chain(
        self, request: GenerateRequest, scope_root: bytes, salt: SaltPoint | None = None
    ) -> EncodedChain:
        """Index keys of a request from its scope's root (``shared.blocks.Scope.root``).

        ``salt``: one that enters behind a shared beginning; the root is the one without it. Of
        several prompts the first gives the keys; ``n_tokens`` counts all.
        """
        plan = self._plan(request)
        first, *others = plan.prompts
        if isinstance(first, bytes):
            begun = perf_counter()
            extras = None if salt is None else salt.extras()
            tokens, keys = first, extend_chain(scope_root, first, extras)[0]
            hash_s = perf_counter() - begun
        else:
            segments = self._segments(plan, first)
            begun = perf_counter()
            keys = self._cache.chain(scope_root, segments, salt)
            hash_s = perf_counter() - begun
            tokens = b"".join(segment.tokens for segment in segments)
        size = len(tokens) + sum(len(self._tokens(plan, other)) for other in others)
        self._sample(plan, tokens)
        return EncodedChain(size // 4, tokens, keys, hash_s)

    def takes_long(self, request: GenerateRequest, text_bytes: int) -> bool:
        """Whether :meth:`chain` or :meth:`encode_request` should run on a thread: more than
        ``text_bytes`` of new text, or so many pieces that they take long even if all are known."""
        return is_bulky(request) or self.new_text_bytes(request) > text_bytes

    def new_text_bytes(self, request: GenerateRequest) -> int:
        """About how many bytes of text :meth:`chain` would have to encode now."""
        total = 0
        plan = self._plan(request)
        for pieces in plan.prompts:
            if not isinstance(pieces, bytes):
                held = self._cache.known(pieces, plan.salt)
                total += sum(_size(p) for p, k in zip(pieces, held, strict=True) if not k)
        return total

    @property
    def dated(self) -> bool:
        """Texts depend on the date: a template asks for it."""
        sources = (self.bundle.chat_template, self.bundle.tool_template)
        return any("strftime_now" in source for source in sources if source)

    def stats(self) -> RenderStats:
        """Counts for metrics."""
        cutting = self._cutter is not NO_CUTS
        done, mismatches = self._check.done, self._check.mismatches
        return RenderStats(cutting, len(self._cutter.proven), done, mismatches, self._cache.stats())

    # --- inside ---

    def _plan(self, request: GenerateRequest) -> _Plan:
        """Render and cut once per request object, whoever asks first."""
        with self._plans_lock:
            plan = self._plans.get(request)
        if plan is None or plan.cutter is not self._cutter:
            plan = self._make_plan(request)
            with self._plans_lock:
                self._plans[request] = plan
        return plan

    def _make_plan(self, request: GenerateRequest) -> _Plan:
        cutter = self._cutter
        if request.kind is RouteKind.CHAT:
            prompts: list[str | list[int]] = [self.render_chat(request)]
        else:
            prompts = prompts_of(request)
        cut = [
            tuple(cutter.cut(prompt)) if isinstance(prompt, str) else pack_tokens(prompt)
            for prompt in prompts
        ]
        return _Plan(tuple(cut), request.add_special_tokens, cutter, request.cache_salt or "")

    def _segments(self, plan: _Plan, pieces: Sequence[str]) -> list[Segment]:
        """One prompt's text as segments; pieces not known yet are encoded here."""
        salt = plan.salt
        segments = [
            self._cache.add(piece, self._seen_or_encoded(piece, salt), salt)
            if held is None
            else held
            for piece, held in zip(pieces, self._cache.find(pieces, salt), strict=True)
        ]
        return [*self._before, *segments, *self._after] if plan.special else segments

    def _tokens(self, plan: _Plan, prompt: tuple[str, ...] | bytes) -> bytes:
        """One prompt as packed token ids."""
        if isinstance(prompt, bytes):
            return prompt
        return b"".join(segment.tokens for segment in self._segments(plan, prompt))

    def _seen_or_encoded(self, piece: str, salt: str) -> bytes:
        """Packed tokens of a piece; a long one may have been encoded by another process."""
        if self._shown is None or len(piece) < LONG_ENOUGH:
            return self._encode(piece)
        name = self._shown.name(self.bundle.fingerprint, piece, salt)
        tokens = self._shown.find(name)
        if tokens is None:
            tokens = self._encode(piece)
            self._shown.add(name, tokens)
        return tokens

    def _encode(self, piece: str) -> bytes:
        """Packed tokens of a piece.

        Only the batch form lets other threads run meanwhile; it hands the work to a thread of its
        own, which a short piece is not worth.
        """
        if len(piece) <= SHORT_PIECE:
            encoding = self.tokenizer.encode(piece, add_special_tokens=False)
        else:
            (encoding,) = self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        return pack_tokens(encoding.ids)

    def _whole(self, text: str, *, special: bool) -> bytes:
        """Packed tokens of a text, encoded in one piece."""
        if not special:
            return self._encode(text)
        before, after = (
            b"".join(part.tokens for part in end) for end in (self._before, self._after)
        )
        return before + self._encode(text) + after

    def _sample(self, plan: _Plan, tokens: bytes) -> None:
        """Now and then have a first prompt's ``tokens`` compared with a full encode."""
        pieces = plan.prompts[0]
        if isinstance(pieces, bytes) or len(pieces) < 2:
            return

        def compare() -> bool:
            return self._whole("".join(pieces), special=plan.special) == tokens

        self._check.offer(compare, self._stop_cutting)

    def _stop_cutting(self) -> None:
        self._cutter = NO_CUTS
        self._cache.clear()
        self._log.error("segment_cache_off", tokenizer=self.bundle.fingerprint)


def _size(text: str) -> int:
    return len(text) if text.isascii() else 3 * len(text)


def _read_template(source: str | None) -> ChatTemplate | None:
    try:
        return None if source is None else ChatTemplate(source)
    except jinja2.TemplateSyntaxError as error:
        raise BundleError(f"the chat template cannot be read: {error}") from None
