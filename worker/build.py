"""The composition root: the only place that picks implementations.

``load_model`` is slow and runs in a thread; ``assemble`` runs in the event loop. torch is imported
only when a real model is asked for, and after the thread settings it reads at import.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import PurePath

import structlog

from shared import redisurl
from shared.blocks import stride_of
from shared.errors import ConfigError
from shared.load import WorkerInfo
from shared.paging import BlockPool, spare_blocks
from shared.rediskeys import RedisKeys
from shared.render import Renderer, TokenizerBundle, byte_bundle
from shared.types import WorkerId
from worker.adapters import Adapters, named_folders, read_all
from worker.adapterstore import ReadAdapter
from worker.config import ModelConfig, WorkerConfig
from worker.defaults import OPENAI, SamplingDefaults, read_defaults
from worker.detokenise import Detokenizer
from worker.engine import Engine
from worker.eventlog import EventLog, make_epoch
from worker.fake_runner import FakeModel, FakeRunner
from worker.grammar import GrammarCompiler
from worker.placement import allowed_cores, check_device, pinned_cores
from worker.publish import Published, RedisPublisher
from worker.requests import Limits
from worker.runner import Runner
from worker.scheduler import Scheduler
from worker.service import Loaded, Service
from worker.tokentext import TokenText
from worker.toolformat import ToolSpeech, format_of

FAKE = "fake"
DEFAULT_MODEL = "smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
RENDER_CACHE_BYTES = 64 << 20
FAKE_BLOCKS = 4096
FAKE_MODEL_LEN = 32_768
NO_REDIS = ("", "none")


@dataclass(frozen=True, slots=True)
class Model:
    """What loading yields."""

    runner: Runner
    bundle: TokenizerBundle
    adapters: tuple[tuple[str, str, ReadAdapter], ...] = ()
    """Installed ones: name, folder, and what was read there."""
    defaults: SamplingDefaults = OPENAI
    """For fields that a request leaves out."""


def served_names(config: WorkerConfig) -> tuple[str, ...]:
    """Names the worker answers to; by default what the model's folder, file or hub id is called."""
    if config.model.served_names:
        return config.model.served_names
    path = config.model.path
    if path in (DEFAULT_MODEL, FAKE):
        return (DEFAULT_NAME if path == DEFAULT_MODEL else FAKE,)
    name = PurePath(path).name
    return (name.removesuffix(".gguf") or path,)


def limit_threads(threads: int, environment: MutableMapping[str, str]) -> None:
    """What is read when torch is imported: so many threads, that do not spin while waiting, and
    huge pages for large tensors, because weights and KV are streamed through memory."""
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if threads:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        environment.setdefault("GOMP_SPINCOUNT", "0")


def check_cache(config: WorkerConfig) -> None:
    """Raise ``ConfigError`` for a second tier that could never hold anything."""
    cache = config.cache
    if (cache.host_blocks or cache.host_gib) and not cache.prefix_cache:
        name = "host_blocks" if cache.host_blocks else "host_gib"
        raise ConfigError(f"cache.{name}", getattr(cache, name), "needs cache.prefix_cache")
    if cache.host_gib and not cache.host_blocks and config.model.path == FAKE:
        reason = "the fake model has no size in bytes: give cache.host_blocks"
        raise ConfigError("cache.host_gib", cache.host_gib, reason)


def check_model(model: ModelConfig) -> None:
    """Raise ``ConfigError`` at once for what loading would refuse only after importing torch."""
    pinned_cores(model.pin, allowed_cores())
    path = model.path
    check_device(model.device, fake=path == FAKE)
    if path == FAKE:
        return
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise _missing(path, package)
    if path != DEFAULT_MODEL:
        from worker.model.fetch import local_place

        local_place(path)


def _missing(path: str, package: str | None) -> ConfigError:
    reason = f"needs the package {package!r}: install headwater[worker], or use 'fake'"
    return ConfigError("model.path", path, reason)


def load_model(config: WorkerConfig, progress: Callable[[str], None] | None = None) -> Model:
    """Load weights and tokenizer. Takes seconds to minutes; raises ``ConfigError``.

    ``progress`` is told in one line about anything that takes long; by default it is logged.
    """
    folders = adapter_folders(config)
    if config.model.path == FAKE:
        fake = _fake_model(config)
        return replace(fake, adapters=read_all(fake.runner.adapters, folders))
    limit_threads(config.model.threads, os.environ)
    log = structlog.get_logger("worker.load")
    tell = _each_once(progress or (lambda text: log.info("loading", step=text)))
    _fetch_first(config.model.path, tell)
    try:
        from worker.model.runner import TorchRunner
    except ModuleNotFoundError as error:
        raise _missing(config.model.path, error.name) from None
    runner = TorchRunner.load(config.model, config.cache, progress=tell)
    defaults = OPENAI
    if config.model.generation_config == "auto":
        defaults = read_defaults(runner.folder)
    return Model(runner, runner.bundle, read_all(runner.adapters, folders), defaults)


def _fetch_first(path: str, tell: Callable[[str], None]) -> None:
    """Have a hub's model here before torch is imported, which takes seconds: that it cannot be had
    is known much sooner. Raises ``ConfigError``."""
    from worker.model.fetch import hub_snapshot, local_place

    if path != DEFAULT_MODEL and local_place(path) is None:
        hub_snapshot(path, tell)


def _each_once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Says nothing a second time."""
    said: set[str] = set()

    def once(text: str) -> None:
        if text not in said:
            said.add(text)
            tell(text)

    return once


def adapter_folders(config: WorkerConfig) -> dict[str, str]:
    """Adapters to load at start: folders by name. Raises ``ConfigError``."""
    model = config.model
    return named_folders(model.lora_modules, served_names(config), model.max_loras)


def assemble(
    service: Service, model: Model, worker: WorkerId, url: str
) -> tuple[Loaded, EventLog, RedisPublisher | None]:
    """Engine, event log and publisher for a loaded model; starts the engine's thread."""
    config, runner = service.config, model.runner
    epoch = make_epoch(int(service.wall() * 1e3), random.SystemRandom().getrandbits(16))
    log = EventLog(worker, epoch, stride_of(runner.block_size), wall=service.wall)
    log.attach(asyncio.get_running_loop())
    renderer = Renderer(model.bundle, RENDER_CACHE_BYTES)
    tokens = TokenText(renderer.tokenizer)
    engine = Engine(
        runner,
        _scheduler(config, runner),
        lambda prompt: Detokenizer(tokens.decode, prompt),
        service.clock,
        log.append,
        service.metrics.on_step,
    )
    engine.start()
    adapters = Adapters(
        runner.adapters,
        engine,
        taken=service.names,
        limit=config.model.max_loras,
        wall=service.wall,
    )
    for name, folder, read in model.adapters:
        adapters.adopt(name, folder, read)
    pool_tokens = runner.n_blocks * runner.block_size
    limit = min(runner.max_model_len, pool_tokens)
    template = model.bundle.tool_template or model.bundle.chat_template
    loaded = Loaded(
        engine=engine,
        adapters=adapters,
        renderer=renderer,
        bundle=model.bundle,
        tokens=tokens,
        grammars=_grammars(model, renderer),
        speech=ToolSpeech(format_of(template), tokens.added_id, tokens.is_special),
        limits=Limits(runner.vocab_size, limit, model.defaults),
        info=WorkerInfo(
            id=worker,
            epoch=epoch,
            url=url,
            models=service.names,
            block_size=runner.block_size,
            blocks_total=runner.n_blocks,
            max_model_len=limit,
            tokenizer=model.bundle.fingerprint,
            prefix_cache=config.cache.prefix_cache,
            shares_prefixes=True,
            version=version("headwater"),
        ),
    )
    return loaded, log, _publisher(service, log)


def check_redis(url: str) -> None:
    """Raise ``ConfigError`` for a URL that no client could use; a password is not repeated."""
    if url in NO_REDIS:
        return
    redisurl.check(url)


def _publisher(service: Service, log: EventLog) -> RedisPublisher | None:
    config = service.config
    if config.redis.url in NO_REDIS:
        return None
    published = Published(service.info, service.load, service.contents, service.able)
    return RedisPublisher(
        config.redis,
        RedisKeys(config.deployment.name),
        log,
        published,
        clock=service.clock,
        rng=random.Random(),
    )


def _fake_model(config: WorkerConfig) -> Model:
    """Byte tokens that look like text, at the speed the configuration asks for."""
    bundle = byte_bundle()
    fake = FakeModel(
        n_blocks=config.cache.kv_blocks or FAKE_BLOCKS,
        block_size=config.cache.block_size,
        eos_token_ids=frozenset(bundle.eos_token_ids),
        max_model_len=config.model.max_model_len or FAKE_MODEL_LEN,
        prefill_s_per_token=config.fake.prefill_us_per_token / 1e6,
        decode_s_per_step=config.fake.decode_ms_per_step / 1e3,
        max_lora_rank=config.model.max_lora_rank,
        host_blocks=config.cache.host_blocks,
        copy_s_per_block=config.fake.copy_us_per_block / 1e6,
    )
    runner = FakeRunner(fake, sleep=time.sleep, clock=time.monotonic, rng=random.Random())
    return Model(runner, bundle)


def _scheduler(config: WorkerConfig, runner: Runner) -> Scheduler:
    pool = BlockPool(
        runner.n_blocks,
        runner.block_size,
        caching=config.cache.prefix_cache,
        host_blocks=runner.host_blocks,
        spare=spare_blocks(runner.n_blocks),
    )
    return Scheduler(
        pool,
        max_batch_tokens=config.schedule.max_batch_tokens,
        max_running=config.schedule.max_running,
        max_waiting=config.schedule.max_waiting,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        max_step_ms=config.schedule.max_step_ms,
    )


def _grammars(model: Model, renderer: Renderer) -> GrammarCompiler:
    """Compiler for a model's tokenizer, which may know more ids than the model, or fewer."""
    ids = renderer.tokenizer.get_vocab().values()
    tokens = max(model.runner.vocab_size, max(ids, default=0) + 1)
    return GrammarCompiler(model.bundle.tokenizer_json, tokens, model.runner.eos_token_ids)
