"""What a worker says about itself: who it is (once) and how busy it is (each second)."""

from __future__ import annotations

import msgspec

from shared.types import Epoch, WorkerId

MAX_ID = 256
"""Longest worker id."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """A LoRA adapter that a worker answers to."""

    name: str
    revision: str = ""
    """Digest of its files: other weights under an old name are another adapter. Empty = unknown."""

    @property
    def scope(self) -> str:
        """What enters the hash scope; never empty. A revision holds no ``@``."""
        return f"{self.name}@{self.revision}"


Names = tuple[tuple[str, ...], tuple[AdapterInfo, ...]]
"""Models and adapters that a worker answers to."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """Identity and capabilities: ``GET /headwater/info``, and the registration in Redis."""

    id: WorkerId
    epoch: Epoch
    url: str
    """Base URL, e.g. ``http://127.0.0.1:8100``."""
    models: tuple[str, ...]
    """Names it answers to; the first stands for all in the hash scope (but see ``many_models``)."""
    engine: str = "headwater"
    block_size: int = 16
    """Tokens per KV block."""
    blocks_total: int = 0
    max_model_len: int = 0
    """Longest prompt + answer in tokens; 0 = unknown."""
    tokenizer: str = ""
    """Fingerprint of its tokenizer bundle (``shared.render``); empty = unknown."""
    prefix_cache: bool = True
    event_feed: bool = True
    """It publishes cache events."""
    adapters: tuple[AdapterInfo, ...] = ()
    """Adapters of the model, each of which it answers to by name."""
    revision: int = 0
    """Grows with each change of what is said here while the worker runs."""
    version: str = ""
    many_models: bool = False
    """Its names are those of different models, none of them an alias."""
    shares_prefixes: bool = False
    """It can let a salt enter behind an approved beginning (``shared.sharedprefix``)."""

    def canonical(self, name: str) -> str:
        """The name that stands for a model in the hash scope."""
        if self.many_models and name in self.models:
            return name
        return self.models[0] if self.models else ""

    @property
    def names(self) -> Names:
        """Everything it answers to."""
        return self.models, self.adapters

    def fault(self) -> str | None:
        """Why nobody could work with this; None if it can be used."""
        if not self.id or len(self.id) > MAX_ID or not self.id.isprintable():
            return f"the id must be 1 to {MAX_ID} printable characters"  # it goes into headers
        if self.block_size < 1:
            return f"a block size of {self.block_size}"
        if self.max_model_len < 0 or self.blocks_total < 0:
            return "a size below 0"
        return None


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's load at one moment, all counts >= 0."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens of waiting and running requests that still have to be computed."""
    blocks_total: int = 0
    blocks_used: int = 0
    """Held by running requests."""
    blocks_cached: int = 0
    """Reusable contents that nobody holds."""
    prefill_tokens_per_s: float = 0.0
    """Measured rate while prefilling; 0 = not measured yet."""
    decode_tokens_per_s: float = 0.0
    """Measured rate of one sequence while decoding; 0 = not measured yet."""
    host_blocks_total: int = 0
    """Blocks that fit in host memory, the second tier; 0 = there is none."""
    host_blocks_used: int = 0
    host_tokens_per_s: float = 0.0
    """Measured rate of loading cached tokens from host memory; 0 = not measured yet."""
    draining: bool = False
    uptime_s: float = 0.0
    info_revision: int = 0
    """``WorkerInfo.revision``: whoever knows another one has to ask again."""

    @property
    def blocks_free(self) -> int:
        """Blocks without any contents."""
        return max(0, self.blocks_total - self.blocks_used - self.blocks_cached)
