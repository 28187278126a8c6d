"""Executes step plans on a real model: plan -> tensors -> logits -> tokens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Self

import structlog
import torch
from torch import Tensor

from shared.bundle import BundleError, TokenizerBundle, load_bundle
from shared.errors import ConfigError
from worker.config import CacheConfig, ModelConfig
from worker.model.attention import ATTENTION, register
from worker.model.batch import Layout, StepBatch, build_batch
from worker.model.fetch import Progress
from worker.model.hostkv import HostKv
from worker.model.kernels.base import Kernel
from worker.model.kernels.choose import choose
from worker.model.kvcache import KvPool, bytes_per_block
from worker.model.lora import LoraStore, grouped
from worker.model.memory import allocate, allocate_host, blocks_that_fit
from worker.model.quantize import quantized
from worker.model.recorded import RecordedDecode, Recorder
from worker.model.sampler import Sampler
from worker.model.scores import NOTHING_SCORED, Scored, score_prompts
from worker.model.selfcheck import check_against_plain
from worker.model.speedups import (
    compile_model,
    decode_recorder,
    takes_decodes,
    with_cpu_kernels,
    with_layer_calls,
)
from worker.model.support import Unsupported
from worker.model.weights import LoadedModel, load_model
from worker.placement import allowed_cores, pinned_cores
from worker.runner import RunnerError, StepPlan, StepResult

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class AttentionCounts:
    """Chunks whose KV was read in place, and chunks whose KV had to be gathered first."""

    views: int = 0
    gathers: int = 0


class TorchRunner:
    """``worker.runner.Runner`` over one loaded model. Called from one thread at a time.

    ``rng`` draws for requests without a seed; by default it is seeded by the system.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        n_blocks: int,
        block_size: int,
        *,
        threads: int = 0,
        rng: Random | None = None,
    ) -> None:
        register()
        self._loaded = loaded
        self._model = loaded.model
        self._model.set_attn_implementation(ATTENTION)
        self._cores: frozenset[int] = frozenset()
        """Those that the thread which calls :meth:`run`, and its helpers, keep to; empty: any."""
        self._threads = threads or len(allowed_cores() or ()) or os.cpu_count() or 1
        self._owner: int | None = None
        self._pool = allocate(loaded, n_blocks, block_size)
        self._layout = Layout(
            loaded.device,
            kernel=choose(loaded.device, list(self._pool.layers.values()), block_size),
            cpu_kernels=loaded.cpu_kernels if takes_decodes(loaded) else None,
        )
        self._host: HostKv | None = None
        self.recorded: RecordedDecode | None = None
        self._sampler = Sampler(loaded.eos_token_ids, rng or Random(), loaded.largest)
        self.counts = AttentionCounts()
        self.adapters = LoraStore(loaded.model)

    @classmethod
    def load(
        cls, model: ModelConfig, cache: CacheConfig, progress: Progress = lambda _: None
    ) -> Self:
        """Load, check and size everything. Raises ``ConfigError`` with the reason."""
        allowed = allowed_cores()
        cores = pinned_cores(model.pin, allowed)
        threads = model.threads or len(cores or allowed or ()) or os.cpu_count() or 1
        torch.set_num_threads(threads)
        loaded = load_model(
            model.path,
            model.device,
            model.dtype,
            cache_dir=model.cache_dir,
            max_model_len=model.max_model_len,
            progress=progress,
        )
        record = decode_recorder(loaded) if model.cuda_graphs else None
        loaded = with_cpu_kernels(loaded, model, threads)
        if model.quantize != "none":
            loaded = quantized(loaded, cache.block_size)
        loaded = with_layer_calls(loaded, model, threads)
        n_blocks = cache.kv_blocks or blocks_that_fit(loaded, cache.block_size)
        runner = cls(loaded, n_blocks, cache.block_size, threads=threads)
        runner._cores = cores
        host_bytes = int(cache.host_gib * 2**30)
        runner.use_host_memory(
            cache.host_blocks or host_bytes // bytes_per_block(loaded.layers, cache.block_size)
        )
        try:
            runner.check()
        except Unsupported as error:
            raise ConfigError("model.path", model.path, f"not supported: {error}") from error
        if model.max_loras:
            runner.adapters.max_rank = model.max_lora_rank
            runner.adapters.survey(runner.logits_by_modules, runner.block_size * runner.n_blocks)
        if model.compile:
            runner.compile(progress)
        if record is not None:
            runner.record_decodes(record)
        return runner

    def use_host_memory(self, n_slots: int) -> None:
        """Make room for evicted blocks; call before the first step. Raises ``ConfigError`` if there
        is not so much memory."""
        if not n_slots:
            return
        self._host = allocate_host(self._loaded, self._pool, n_slots)

    def compile(self, progress: Progress, backend: str = "inductor") -> None:
        """Compile the model for steps without adapters. Raises ``ConfigError`` if that fails."""
        self._loaded = compile_model(self._loaded, progress, backend)
        try:
            self.check()
        except Unsupported as error:
            raise ConfigError("model.compile", True, f"compiled, {error}") from error

    def record_decodes(self, record: Recorder) -> None:
        """Replay decode steps that ``record`` recorded, from now on."""
        self.recorded = RecordedDecode(self._loaded, self._pool, record)

    @property
    def kernel(self) -> Kernel | None:
        """The attention kernel of whole steps; None if each sequence is computed alone."""
        return self._layout.kernel

    def use_kernel(self, kernel: Kernel | None) -> None:
        """Compute attention with another one."""
        self._layout = replace(self._layout, kernel=kernel)
        if self.recorded is not None:
            self.recorded.clear()

    def check(self) -> None:
        """Compare with the model's own attention on a few tokens. Raises ``Unsupported``.

        Where a kernel fails the comparison, each sequence is computed alone, and that is logged.
        """
        args = (self._loaded, self._pool.block_size)
        if self.kernel is not None:
            try:
                check_against_plain(*args, self._layout)
                return
            except (Unsupported, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                log.warning("attention_kernel_unusable", kernel=self.kernel.name, reason=reason)
                self.use_kernel(None)
        check_against_plain(*args, self._layout)

    @property
    def n_blocks(self) -> int:
        """KV blocks that exist."""
        return self._pool.n_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._pool.block_size

    @property
    def host_blocks(self) -> int:
        """Slots for blocks in host memory."""
        return 0 if self._host is None else self._host.n_slots

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self._loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are in ``range(vocab_size)``."""
        return self._loaded.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless ``ignore_eos``."""
        return self._loaded.eos_token_ids

    @property
    def model_name(self) -> str:
        """Name under which the model is served unless told otherwise."""
        return self._loaded.name

    @property
    def folder(self) -> str:
        """Where the model's files lie; empty if it has none."""
        return self._loaded.source

    @property
    def bundle(self) -> TokenizerBundle:
        """Tokenizer and chat template. Raises ``ConfigError`` if the model came without."""
        try:
            return load_bundle(self._loaded.source)
        except BundleError as error:
            raise ConfigError("model.path", self._loaded.source, str(error)) from error

    @property
    def pool(self) -> KvPool:
        """The KV memory, for tests and measurements."""
        return self._pool

    def run(self, plan: StepPlan) -> StepResult:
        """Copy, then compute; writes KV. Raises ``RunnerError`` if the step is lost as a whole."""
        started = time.perf_counter()
        self._adopt_thread()
        plan = grouped(plan)
        sampled = [chunk for chunk in plan.chunks if chunk.sample]
        scoring = any(chunk.targets for chunk in plan.chunks)
        try:
            if self._host is not None and plan.copies:
                with torch.inference_mode():
                    self._host.copy(plan.copies)
            logits, scored = self._scored(plan) if scoring else (self.logits(plan), NOTHING_SCORED)
            chosen = self._sampler.sample(logits, sampled)
        except (RuntimeError, IndexError, ValueError) as error:
            raise RunnerError(f"step of {plan.n_tokens} tokens failed: {error}") from error
        copying = self._host.seconds() if self._host is not None and plan.copies else 0.0
        return StepResult(
            chosen.tokens,
            chosen.logprobs,
            time.perf_counter() - started,
            {**chosen.failed, **scored.failed},
            scored.logprobs,
            copying,
        )

    def logits(self, plan: StepPlan) -> Tensor:
        """Forward alone: logits ``[S, V]`` of the chunks that sample, in plan order. Writes KV."""
        logits = None if self.recorded is None else self.recorded.logits(plan, self.kernel)
        if logits is not None:
            return logits
        plain = not any(chunk.adapter for chunk in plan.chunks)
        if plain and self._loaded.compiled is None:
            return self._loaded.forward(self._batch(plan))
        with torch.inference_mode():  # tensors made outside of it would be compiled for anew
            batch = self._batch(plan)
            if plain:
                return self._loaded.forward(batch)
            with self.adapters.applied(plan, batch):
                return self._loaded.forward(batch, changed=True)

    def logits_by_modules(self, plan: StepPlan) -> Tensor:
        """As :meth:`logits`, by the model's own modules, each of which sees its rows."""
        return self._loaded.forward(self._batch(plan), changed=True)

    def _scored(self, plan: StepPlan) -> tuple[Tensor, Scored]:
        """As :meth:`logits`, and what the plan's prompts score."""
        batch = self._batch(plan)
        with (
            torch.inference_mode(),
            self.adapters.applied(plan, batch),
            self._loaded.layers_run_once(),
        ):
            logits = self._loaded.forward(batch, changed=True)
            return logits, score_prompts(plan.chunks, partial(self._logits_of, batch))

    def _batch(self, plan: StepPlan) -> StepBatch:
        batch = build_batch(plan, self._pool, self._layout)
        self.counts.views += batch.views
        self.counts.gathers += len(batch.spans) - batch.views
        return batch

    def _logits_of(self, batch: StepBatch, rows: Sequence[int]) -> Tensor:
        self.adapters.head_gets(rows)
        kept = torch.tensor(rows, device=self._loaded.device)
        return self._loaded.forward(batch, kept, changed=True)

    def forget(self, seq_id: str) -> None:
        """Nothing is kept per sequence: a seeded draw is a function of seed and position."""

    def close(self) -> None:
        """Free the KV memory; no call follows."""
        self._pool.layers.clear()
        self._host = None

    def _adopt_thread(self) -> None:
        """OpenMP counts threads per calling thread: tell it when another thread first calls."""
        if self._owner != threading.get_ident():
            if self._cores:  # before OpenMP starts this thread's helpers, which inherit it
                os.sched_setaffinity(0, self._cores)
            torch.set_num_threads(self._threads)
            self._owner = threading.get_ident()
