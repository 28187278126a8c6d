"""Which LoRA adapters a worker answers to: loaded and unloaded while it serves.

Files are read in a thread; weights are installed and removed on the engine thread, between two
steps. An adapter that was unloaded takes no new request from that moment on; those that run end
with its weights, and the last of them lets the weights go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from shared.errors import BadRequest, ConfigError, ModelNotFound, NotFound
from shared.load import AdapterInfo
from worker.adapterfiles import AdapterMissing, AdapterRefused
from worker.adapterstore import AdapterStore, ReadAdapter

MAX_NAME = 256


class OnEngine(Protocol):
    """The engine, as far as adapters need it."""

    def call(self, function: Callable[[], None]) -> Awaitable[None]:
        """Run between two steps; done when the result is awaited."""
        ...

    def post(self, function: Callable[[], None]) -> None:
        """Run between two steps, some time later, in the order given."""
        ...


@dataclass(eq=False)
class Adapter:
    """One incarnation of an adapter. Event loop only."""

    info: AdapterInfo
    path: str
    read: ReadAdapter
    loaded_at: float
    """Wall clock, seconds since the epoch."""
    requests: int = 0
    """That run or wait."""
    leaving: bool = False
    """Unloaded: no new requests."""


class Adapters:
    """All adapters by name, and those that leave.

    :param taken: names of the model itself.
    :param changed: called when other adapters are served than before.
    """

    def __init__(
        self,
        store: AdapterStore,
        engine: OnEngine,
        *,
        taken: tuple[str, ...],
        limit: int,
        wall: Callable[[], float],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._engine, self._taken, self._limit = store, engine, taken, limit
        self._wall = wall
        self.changed = changed
        self._served: dict[str, Adapter] = {}
        self._kept: dict[str, Adapter] = {}
        """By scope: the served ones, and those that leave."""
        self._one_at_a_time = asyncio.Lock()
        self._loads: set[asyncio.Task[Adapter]] = set()
        """Under way; their callers may have left."""
        self._log = structlog.get_logger("worker.adapters")

    def __iter__(self) -> Iterator[Adapter]:
        """Served ones in the order in which they came, then those that leave."""
        served = list(self._served.values())
        return iter(served + [one for one in self._kept.values() if one.leaving])

    def served(self) -> tuple[Adapter, ...]:
        """Those that take requests."""
        return tuple(self._served.values())

    def get(self, name: str) -> Adapter | None:
        """The adapter that answers to a name."""
        return self._served.get(name)

    def adopt(self, name: str, path: str, read: ReadAdapter) -> None:
        """Take in an adapter that has been installed before the engine was started."""
        self._serve(Adapter(AdapterInfo(name, read.revision), path, read, self._wall()))

    async def load(self, name: str, path: str, *, replace: bool = False) -> Adapter:
        """Read a folder and serve it under a name.

        :param replace: a served adapter of that name makes way.
        :raises BadRequest: the name is taken, there are too many, or the folder is no adapter for
            this model.
        :raises NotFound: there is no such folder.
        """
        task = asyncio.create_task(self._load(name, path, replace=replace), name="load adapter")
        self._loads.add(task)
        task.add_done_callback(self._loaded)
        # shielded: a caller who hangs up must not leave installed weights that nobody counts
        return await asyncio.shield(task)

    def _loaded(self, task: asyncio.Task[Adapter]) -> None:
        """What went wrong is told here too: its caller may have left before it came."""
        self._loads.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.info("adapter_not_loaded", reason=str(error)[:200])

    async def _load(self, name: str, path: str, *, replace: bool) -> Adapter:
        async with self._one_at_a_time:
            self._check_name(name, replace=replace)
            try:
                read = await asyncio.to_thread(self._store.read, path)
            except AdapterRefused as error:
                raise _refusal(name, error) from None
            info = AdapterInfo(name, read.revision)
            adapter = self._kept.get(info.scope)
            if adapter is None:
                adapter = Adapter(info, path, read, self._wall())
                await self._engine.call(lambda: self._store.install(info.scope, read))
            adapter.path = path
            self._serve(adapter)
            self._log.info("adapter_loaded", adapter=name, path=path, revision=read.revision)
            return adapter

    async def unload(self, name: str) -> Adapter:
        """Take no more requests for an adapter. Raises ``NotFound``."""
        async with self._one_at_a_time:
            adapter = self._served.pop(name, None)
            if adapter is None:
                raise ModelNotFound(f"The adapter {name[:128]!r} is not loaded.", param="lora_name")
            self._retire(adapter)
            self._log.info("adapter_unloaded", adapter=name, requests=adapter.requests)
            self.changed()
            return adapter

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Keep an adapter's weights as long as a request may need them."""
        if adapter is None:
            yield
            return
        adapter.requests += 1
        try:
            yield
        finally:
            adapter.requests -= 1
            self._let_go_if_done(adapter)

    def _serve(self, adapter: Adapter) -> None:
        before = self._served.get(adapter.info.name)
        adapter.leaving = False
        self._served[adapter.info.name] = self._kept[adapter.info.scope] = adapter
        if before is not None and before is not adapter:
            self._retire(before)
        self.changed()

    def _retire(self, adapter: Adapter) -> None:
        adapter.leaving = True
        self._let_go_if_done(adapter)

    def _let_go_if_done(self, adapter: Adapter) -> None:
        # What its requests gave back to the engine lies in the same inbox, before this.
        if adapter.leaving and not adapter.requests:
            scope = adapter.info.scope
            del self._kept[scope]
            self._engine.post(lambda: self._store.remove(scope))

    def _check_name(self, name: str, *, replace: bool) -> None:
        fault = name_fault(name, self._taken)
        if fault is not None:
            raise BadRequest(f"The name {name[:128]!r} cannot be used: {fault}.", param="lora_name")
        if name in self._served:
            if replace:
                return
            raise BadRequest(
                f"The adapter {name!r} is loaded already; 'load_inplace' replaces it.",
                param="lora_name",
            )
        if len(self._served) >= self._limit:
            raise BadRequest(
                f"No more than {self._limit} adapters are served here (model.max_loras).",
                param="lora_name",
            )


def name_fault(name: str, taken: tuple[str, ...]) -> str | None:
    """Why an adapter cannot have a name; None if it can."""
    if name in taken:
        return "it is the name of the model itself"
    if not name or name != name.strip() or not name.isprintable() or len(name) > MAX_NAME:
        return f"it must be 1 to {MAX_NAME} printable characters"
    return None


def named_folders(modules: tuple[str, ...], taken: tuple[str, ...], limit: int) -> dict[str, str]:
    """``NAME=DIR`` settings by name. Raises ``ConfigError``."""
    folders: dict[str, str] = {}
    for text in modules:
        name, separator, folder = text.partition("=")
        if not separator or not folder:
            raise ConfigError("model.lora_modules", text, "must be NAME=DIR")
        fault = "it is named twice" if name in folders else name_fault(name, taken)
        if fault is not None:
            raise ConfigError("model.lora_modules", text, fault)
        folders[name] = folder
    if len(folders) > limit:
        raise ConfigError("model.lora_modules", len(folders), f"model.max_loras is {limit}")
    return folders


def read_all(
    store: AdapterStore, folders: dict[str, str]
) -> tuple[tuple[str, str, ReadAdapter], ...]:
    """Read and install adapters before the engine starts. Raises ``ConfigError``."""
    found: list[tuple[str, str, ReadAdapter]] = []
    for name, folder in folders.items():
        try:
            read = store.read(folder)
        except AdapterRefused as error:
            raise ConfigError("model.lora_modules", f"{name}={folder}", str(error)) from None
        store.install(AdapterInfo(name, read.revision).scope, read)
        found.append((name, folder, read))
    return tuple(found)


def _refusal(name: str, error: AdapterRefused) -> BadRequest | NotFound:
    message = f"The adapter {name!r} cannot be loaded: {error}."
    if isinstance(error, AdapterMissing):
        return NotFound(message, param="lora_path")
    return BadRequest(message, param="lora_path")
