"""From requests to hash chains, with the tokenizer that the workers themselves use.

A tokenizer is loaded once per fingerprint, in the background: from ``render.tokenizers`` if the
model is named there, else from a worker. Until it is there (or if it cannot be had) requests are
routed without keys, by load; nobody waits for it. A failed load is tried again after a pause, never
per request. Workers that name no tokenizer are known by blocks of text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self

import msgspec
import structlog

from gateway.approved import Approvals, Beginning
from gateway.bundles import BundleSource
from gateway.config import RenderConfig
from gateway.decision import ModelProfile
from gateway.router import Router
from gateway.ticks import tick
from shared.blocks import SaltPoint, Scope
from shared.bundle import TokenizerBundle, load_bundle
from shared.errors import HeadwaterError
from shared.openai import GenerateRequest, own_salt, prompts_of
from shared.render import Renderer
from shared.sharedprefix import SharedPrefix
from shared.shownpieces import ShownPieces
from shared.textchain import EncodedChain, TextChain
from shared.types import BlockKey

RETRY_LOAD_S = 10.0
"""Pause after a tokenizer could not be loaded."""
WATCH_S = 0.25
"""How soon a new model's tokenizer is asked for."""
ROOTS_KEPT = 4096
MOST_PROMPTS = 64
"""Of one list that are looked up one by one: with a hundred workers that takes 5 ms."""
TEXT = "text"
"""Takes the tokenizer's place in the hash scope of blocks of text."""


class Prompt(msgspec.Struct, frozen=True):
    """What routing needs to know of a prompt; empty while its tokenizer is being loaded."""

    keys: Sequence[BlockKey] = ()
    n_tokens: int = 0
    """0 = not counted."""
    seconds: float = 0.0
    """Time spent on rendering and encoding."""
    hash_s: float = 0.0
    adapter: str = ""
    """Scope of the adapter that is asked."""
    plain_keys: Sequence[BlockKey] = ()
    """Keys without the request's cache salt; empty if it has none."""
    shared: str = ""
    """For workers of ours: the approved beginning behind which the salt enters; empty: none."""
    prompts: tuple[Prompt, ...] = ()
    """Of a list of prompts: each of them. The keys are the first one's then, the rest sums."""

    @classmethod
    def of_list(cls, prompts: Sequence[Prompt], shared: str) -> Self:
        """Of one prompt at least."""
        return cls(
            keys=prompts[0].keys,
            n_tokens=sum(one.n_tokens for one in prompts),
            seconds=sum(one.seconds for one in prompts),
            hash_s=sum(one.hash_s for one in prompts),
            adapter=prompts[0].adapter,
            plain_keys=prompts[0].plain_keys,
            shared=shared,
            prompts=tuple(prompts),
        )


class _Chained(NamedTuple):
    """The chains of one prompt."""

    own: EncodedChain
    plain: EncodedChain
    """Without the request's salt: ``own`` if it has none."""
    shared: str = ""
    """See :class:`Prompt`."""

    @property
    def hash_s(self) -> float:
        """Seconds spent on keys."""
        return self.own.hash_s + (0.0 if self.plain is self.own else self.plain.hash_s)


class Prompts:
    """Keeps one :class:`Renderer` per tokenizer and turns requests into keys."""

    def __init__(
        self,
        config: RenderConfig,
        hash_key: bytes,
        source: BundleSource,
        approved: tuple[Beginning, ...] = (),
        *,
        shown: ShownPieces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shown = shown
        self._config, self._hash_key, self._source, self._clock = config, hash_key, source, clock
        self._approvals = Approvals(approved, clock)
        self._log = structlog.get_logger("headwater.prompts")
        self._renderers: dict[str, Renderer] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._roots: dict[tuple[str, str, str], bytes] = {}
        self._text = TextChain()
        # One thread: long encodes queue behind each other instead of taking all cores.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def read(self, request: GenerateRequest, profile: ModelProfile) -> Prompt:
        """Keys and length of a prompt.

        Never waits for a tokenizer. Raises ``BadRequest`` if the model's template refuses the
        messages.
        """
        renderer: Renderer | TextChain | None = self._text
        if profile.tokenizer:
            renderer = self._renderers.get(profile.tokenizer)
        if renderer is None:
            self.want(profile)
            return Prompt(adapter=profile.adapter)
        begun = self._clock()
        long = renderer.takes_long(request, self._config.offload_bytes)  # which renders it
        if request.several_prompts:
            return await self._read_list(request, profile, renderer, begun, long=long)
        return await self._read(request, profile, renderer, begun, long=long)

    async def _read_list(
        self,
        request: GenerateRequest,
        profile: ModelProfile,
        renderer: Renderer | TextChain,
        begun: float,
        *,
        long: bool,
    ) -> Prompt:
        """Each prompt by itself. Of very many the last ones are counted only."""
        given = prompts_of(request)
        asked: list[object] = [*given[: MOST_PROMPTS - 1], given[MOST_PROMPTS - 1 :]]
        if len(given) <= MOST_PROMPTS:
            asked = [*given]
        read, told = list[Prompt](), None
        for prompt in asked:
            one = msgspec.structs.replace(request, prompt=prompt)
            read.append(await self._read(one, profile, renderer, begun, told, long=long))
            told = told or SharedPrefix.read(read[-1].shared)
            await asyncio.sleep(0)
            begun = self._clock()
        return Prompt.of_list(read, "" if told is None else told.text)

    async def _read(
        self,
        request: GenerateRequest,
        profile: ModelProfile,
        renderer: Renderer | TextChain,
        begun: float,
        told: SharedPrefix | None = None,
        *,
        long: bool,
    ) -> Prompt:
        """One prompt, on the thread if that takes ``long``.

        :param begun: when somebody began to look into it.
        :param told: the approved beginning of the list that it is in.
        """
        root = self._root(profile, "")
        salt = self._root(profile, request.cache_salt) if request.cache_salt else b""
        if long:
            chained = asyncio.get_running_loop().run_in_executor(
                self._threads, self._chained, renderer, request, profile, root, salt, told
            )
            keys = await chained
        else:
            keys = self._chained(renderer, request, profile, root, salt, told)
        seconds = self._clock() - begun
        hash_s = min(seconds, keys.hash_s) if profile.tokenizer else seconds
        return Prompt(
            keys=keys.own.keys,
            n_tokens=keys.own.n_tokens,
            seconds=seconds - hash_s,
            hash_s=hash_s,
            adapter=profile.adapter,
            plain_keys=keys.plain.keys if salt else (),
            shared=keys.shared,
        )

    def _chained(
        self,
        renderer: Renderer | TextChain,
        request: GenerateRequest,
        profile: ModelProfile,
        root: bytes,
        salt: bytes,
        told: SharedPrefix | None,
    ) -> _Chained:
        """Chains of a prompt from its scope's root, and from that with a salt. On any thread."""
        plain = renderer.chain(request, root)
        if not salt:
            return _Chained(plain, plain)
        # The text is in the segment cache now: this only hashes.
        claim = self._claim(request, profile, root, plain.token_bytes, told)
        if claim is not None and isinstance(renderer, Renderer):
            own = renderer.chain(request, root, SaltPoint(claim.tokens, salt))
            return _Chained(own, plain, claim.text)
        return _Chained(renderer.chain(request, salt), plain)

    def read_text(self, text: bytes, profile: ModelProfile, salt: str) -> Prompt:
        """Keys of a prompt that is known as text only, whatever tokenizer its workers have."""
        if not text:
            return Prompt(adapter=profile.adapter)
        begun = self._clock()
        plain = keys = self._text.keys(self._root(profile, "", TEXT), text, salt)
        if salt:
            keys = self._text.keys(self._root(profile, salt, TEXT), text, salt)
        return Prompt(
            keys=keys,
            hash_s=self._clock() - begun,
            adapter=profile.adapter,
            plain_keys=plain if salt else (),
        )

    def _claim(
        self,
        request: GenerateRequest,
        profile: ModelProfile,
        root: bytes,
        tokens: bytes,
        told: SharedPrefix | None,
    ) -> SharedPrefix | None:
        """The approved beginning of a prompt, or of a list the first that was found, if it has that
        one: workers are told of one only."""
        if told is not None:
            return told if told.holds(self._hash_key, root, tokens) else None
        found = self._approved(request, profile, tokens)
        return SharedPrefix.of(self._hash_key, root, found) if found else None

    def _approved(self, request: GenerateRequest, profile: ModelProfile, tokens: bytes) -> bytes:
        """The beginning that tenants share. A client that sent a salt of its own shares none."""
        if not profile.shares_prefixes or own_salt(request):
            return b""
        return self._approvals.find(profile.tokenizer, tokens)

    async def approve(self, approved: tuple[Beginning, ...]) -> None:
        """Other beginnings are approved from now on."""
        self._approvals.replace(approved)
        await self._reckon()

    async def _reckon(self) -> None:
        for name, renderer in list(self._renderers.items()):
            if self._approvals.due(name, renderer):
                await asyncio.to_thread(self._approvals.reckon, name, renderer)

    def unshared(self, profile: ModelProfile) -> tuple[str, ...]:
        """Why what is approved is not shared by this model's tenants."""
        return self._approvals.faults(profile.tokenizer, able=profile.shares_prefixes)

    def _root(self, profile: ModelProfile, salt: str, tokenizer: str = "") -> bytes:
        """First state of the hash chain; kept for the usual case without a salt."""
        tokenizer = tokenizer or profile.tokenizer or TEXT
        name = (profile.canonical, tokenizer, profile.adapter)
        root = None if salt else self._roots.get(name)
        if root is None:
            scope = Scope(profile.canonical, tokenizer, adapter=profile.adapter, salt=salt)
            root = scope.root(self._hash_key)
            if not salt:
                if len(self._roots) >= ROOTS_KEPT:
                    self._roots.clear()  # adapters come and go
                self._roots[name] = root
        return root

    def want(self, profile: ModelProfile) -> None:
        """Begin to load a model's tokenizer unless that has been done, or failed just now."""
        name = profile.tokenizer
        if not name or name in self._renderers or name in self._loading:
            return
        failed = self._failed.get(name)
        if failed is not None and self._clock() - failed[0] < RETRY_LOAD_S:
            return
        self._loading[name] = asyncio.create_task(self._load(profile), name="load tokenizer")

    async def watch(self, router: Router) -> None:
        """Ask for the tokenizers of all models, also of those that join later. Never returns."""
        while True:
            for model in router.models():
                profile = router.profile(model)
                if profile is not None:
                    self.want(profile)
            await self._reckon()
            await tick(WATCH_S)

    def renderer(self, tokenizer: str) -> Renderer | None:
        """What makes tokens for a tokenizer's fingerprint; None while it is not loaded."""
        return self._renderers.get(tokenizer)

    def loading(self, tokenizer: str) -> bool:
        """It may be there in a moment."""
        return tokenizer in self._loading

    def missing(self, profile: ModelProfile) -> str | None:
        """Why prompts of this model have no keys; None if they have."""
        if not profile.tokenizer:
            return "the workers name no tokenizer: blocks of text are used"
        if profile.tokenizer in self._renderers:
            return None
        failed = self._failed.get(profile.tokenizer)
        return failed[1] if failed is not None else "the tokenizer is being loaded"

    async def settled(self, timeout_s: float) -> None:
        """Wait until all loads in progress have ended, at most ``timeout_s``."""
        if self._loading:
            await asyncio.wait(self._loading.values(), timeout=timeout_s)

    async def close(self) -> None:
        """Stop loading; waits for no thread."""
        for task in list(self._loading.values()):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, profile: ModelProfile) -> None:
        name = profile.tokenizer
        try:
            bundle = await self._bundle(profile)
            cache_bytes = int(self._config.cache_mib * 2**20)
            renderer = await asyncio.to_thread(Renderer, bundle, cache_bytes, shown=self._shown)
            await asyncio.to_thread(self._approvals.reckon, name, renderer)
        except (HeadwaterError, ValueError, OSError) as error:
            self._failed[name] = (self._clock(), str(error))
            self._log.warning("tokenizer_unavailable", model=profile.canonical, reason=str(error))
        else:
            self._renderers[name] = renderer
            self._failed.pop(name, None)
            self._log.info("tokenizer_ready", model=profile.canonical, fingerprint=name)
        finally:
            del self._loading[name]

    async def _bundle(self, profile: ModelProfile) -> TokenizerBundle:
        path = self._config.tokenizers.get(profile.canonical)
        if path is None:
            return await self._source.fetch(profile)
        bundle = await asyncio.to_thread(load_bundle, path)
        if bundle.fingerprint == profile.tokenizer:
            return bundle
        # Keys made with another tokenizer would never meet the workers': theirs is the right one.
        self._log.warning("tokenizer_differs", model=profile.canonical, configured=path)
        return await self._source.fetch(profile)
