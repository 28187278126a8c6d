"""What all routes of a worker share: the loaded model, its life cycle, and who it is.

loading --loaded()--> serving --drain()--> draining
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from shared.blocks import SaltPoint, Scope, pack_tokens
from shared.errors import ModelNotFound, NoCapacity
from shared.load import AdapterInfo, WorkerInfo, WorkerLoad
from shared.render import Renderer, TokenizerBundle
from shared.sharedprefix import SharedPrefix
from worker.adapters import Adapter, Adapters
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.eventlog import Contents, EventLog
from worker.generation import EngineStats
from worker.grammar import GrammarCompiler
from worker.metrics import WorkerMetrics
from worker.requests import Limits
from worker.tokentext import TokenText
from worker.toolformat import ToolSpeech

RETRY_LOADING_S = 5.0
RETRY_DRAINING_S = 1.0
UNKNOWN_NAMES = 256
"""So many unknown request fields are remembered as already logged."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that exists only once the model is in memory."""

    engine: Engine
    adapters: Adapters
    renderer: Renderer
    bundle: TokenizerBundle
    tokens: TokenText
    grammars: GrammarCompiler
    speech: ToolSpeech
    limits: Limits
    info: WorkerInfo
    """As of the start; :meth:`Service.info` has the adapters of the moment."""


class Service:
    """State of one worker process. Event loop only."""

    def __init__(
        self,
        config: WorkerConfig,
        names: tuple[str, ...],
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.config, self.names = config, names
        self.clock, self.wall = clock, wall
        self.created = int(wall())
        self.metrics = WorkerMetrics(self._stats, self._adapter_counts)
        self.log: EventLog | None = None
        self.redis_up: Callable[[], bool] | None = None
        self._loaded: Loaded | None = None
        self._info: WorkerInfo | None = None
        self._draining = False
        self._unknown: set[str] = set()
        self._logger = structlog.get_logger("worker.service")

    @property
    def loading(self) -> bool:
        """Whether the model is not in memory yet."""
        return self._loaded is None

    @property
    def draining(self) -> bool:
        """Whether new work is refused for good."""
        return self._draining

    def become_ready(self, loaded: Loaded, log: EventLog) -> None:
        """The model is loaded and the engine runs."""
        self._loaded, self.log, self._info = loaded, log, loaded.info
        loaded.adapters.changed = self._tell_adapters
        if loaded.adapters.served():
            self._tell_adapters()

    def drain(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        self._draining = True
        if self._loaded is not None:
            self._loaded.engine.begin_drain()

    def reasons(self) -> list[str]:
        """Why no request can be served now; empty if one can."""
        if self._loaded is None:
            return ["loading model"]
        if self._draining:
            return ["draining"]
        if not self._loaded.engine.healthy(self.clock()):
            return ["the engine is not making progress"]
        return []

    def alive(self) -> bool:
        """Whether the process can ever serve (again): false once the engine thread is dead."""
        return self._loaded is None or self._draining or self._loaded.engine.alive

    def loaded(self) -> Loaded:
        """The model, for reading; raises ``NoCapacity`` while it is being loaded."""
        if self._loaded is None:
            raise NoCapacity("The model is being loaded.", retry_after_s=RETRY_LOADING_S)
        return self._loaded

    def serving(self) -> Loaded:
        """The model, for new work; raises ``NoCapacity`` unless :meth:`reasons` is empty."""
        loaded = self.loaded()
        if self._draining:
            raise NoCapacity("The server is shutting down.", retry_after_s=RETRY_DRAINING_S)
        if not loaded.engine.healthy(self.clock()):
            raise NoCapacity("The engine is not making progress.", retry_after_s=RETRY_LOADING_S)
        return loaded

    def events(self) -> EventLog:
        """The event log; raises ``NoCapacity`` while the model is being loaded."""
        if self.log is None:
            raise NoCapacity("The model is being loaded.", retry_after_s=RETRY_LOADING_S)
        return self.log

    def model_name(self, asked: str | None) -> str:
        """The name to answer under; a request without one means the model itself."""
        if not asked:
            return self.names[0]
        if asked not in self.names and self.adapter(asked) is None:
            names = [*self.names, *(adapter.name for adapter in self._adapters())]
            raise ModelNotFound(
                f"The model {asked[:128]!r} does not exist; served here: {', '.join(names)}.",
                param="model",
            )
        return asked

    def adapter(self, name: str) -> Adapter | None:
        """The adapter that answers to a name; None for the model itself, and while it loads."""
        if self._loaded is None or name in self.names:
            return None
        return self._loaded.adapters.get(name)

    def scope_root(self, salt: str, adapter: str = "") -> bytes:
        """Chain root (16 bytes) of this model with an adapter (its scope) under a salt."""
        scope = Scope(self.names[0], self.info().tokenizer, adapter=adapter, salt=salt)
        return scope.root(self.config.deployment.hash_key)

    def salted(
        self, prompt: Sequence[int], salt: str, adapter: str, shared: SharedPrefix | None
    ) -> tuple[bytes, SaltPoint | None]:
        """Chain root of a prompt under a salt, and where the salt enters if not there.

        :param shared: what the gateway claims of its beginning; believed if this prompt has it.
        """
        own = self.scope_root(salt, adapter)
        if not salt or shared is None:
            return own, None
        public = self.scope_root("", adapter)
        first = pack_tokens(prompt[: shared.tokens])
        if not shared.holds(self.config.deployment.hash_key, public, first):
            return own, None
        return public, SaltPoint(shared.tokens, own)

    def load(self) -> WorkerLoad:
        """How busy the worker is."""
        load = self.loaded().engine.load()
        return msgspec.structs.replace(
            load, draining=self._draining, info_revision=self.info().revision
        )

    def info(self) -> WorkerInfo:
        """Who the worker is, and which adapters it has now."""
        return self._info or self.loaded().info

    def able(self) -> bool:
        """Whether the engine lives and makes progress, draining or not."""
        return self._loaded is not None and self._loaded.engine.healthy(self.clock())

    def contents(self) -> Awaitable[Contents]:
        """The cache's keys and the number of the batch they belong to."""
        return self._contents(self.loaded().engine)

    @staticmethod
    async def _contents(engine: Engine) -> Contents:
        return Contents(*await engine.snapshot())

    def note_unknown(self, names: tuple[str, ...]) -> None:
        """Log field names nobody defines, each once and never their values."""
        fresh = {name if _PLAIN.fullmatch(name) else "(not a plain name)" for name in names}
        fresh -= self._unknown
        if fresh and len(self._unknown) < UNKNOWN_NAMES:
            self._unknown |= fresh
            self._logger.warning("unknown_request_fields_ignored", fields=sorted(fresh)[:16])

    def _adapters(self) -> tuple[AdapterInfo, ...]:
        return () if self._info is None else self._info.adapters

    def _tell_adapters(self) -> None:
        """Other adapters are served than before: whoever asks who this worker is learns it."""
        info, loaded = self.info(), self.loaded()
        served = tuple(adapter.info for adapter in loaded.adapters.served())
        self._info = msgspec.structs.replace(info, adapters=served, revision=info.revision + 1)

    def _adapter_counts(self) -> tuple[int, int]:
        adapters = [] if self._loaded is None else list(self._loaded.adapters)
        leaving = sum(adapter.leaving for adapter in adapters)
        return len(adapters) - leaving, leaving

    def _stats(self) -> EngineStats | None:
        return None if self._loaded is None else self._loaded.engine.stats()
