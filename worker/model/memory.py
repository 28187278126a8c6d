"""How much memory KV blocks may take, and taking it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shared.errors import ConfigError
from worker.model.hostkv import HostKv
from worker.model.kvcache import KvPool, bytes_per_block
from worker.model.weights import LoadedModel

_CPU_SHARE, _CUDA_SHARE = 0.25, 0.85
"""Share of the memory that is free once the weights are loaded; a CPU is shared with others."""
_CPU_MOST_BYTES = 4 << 30


def allocate(loaded: LoadedModel, n_blocks: int, block_size: int) -> KvPool:
    """The KV memory. Raises ``ConfigError`` if there is not so much."""
    try:
        return KvPool(loaded.layers, n_blocks, block_size, loaded.device)
    except (RuntimeError, MemoryError) as error:  # torch raises the first, on a CPU and on CUDA
        gib = n_blocks * bytes_per_block(loaded.layers, block_size) / 2**30
        reason = f"{gib:,.1f} GiB of KV memory cannot be had on {loaded.device}"
        raise ConfigError("cache.kv_blocks", n_blocks, reason) from error


def allocate_host(loaded: LoadedModel, pool: KvPool, n_slots: int) -> HostKv:
    """Memory for evicted blocks. Raises ``ConfigError`` if there is not so much."""
    try:
        return HostKv(pool, n_slots, loaded.device)
    except (RuntimeError, MemoryError) as error:
        gib = n_slots * bytes_per_block(loaded.layers, pool.block_size) / 2**30
        reason = f"{gib:,.1f} GiB of host memory cannot be had"
        raise ConfigError("cache.host_blocks", n_slots, reason) from error


def blocks_that_fit(loaded: LoadedModel, block_size: int) -> int:
    """KV blocks in a share of free memory. Raises ``ConfigError`` if not even one fits."""
    if loaded.device.type == "cuda":
        room = int(torch.cuda.mem_get_info(loaded.device)[0] * _CUDA_SHARE)
    else:
        room = min(int(free_memory() * _CPU_SHARE), _CPU_MOST_BYTES)
    each = bytes_per_block(loaded.layers, block_size)
    if room < each:
        raise ConfigError(
            "cache.kv_blocks", 0, f"one block takes {each >> 20} MiB, {room >> 20} are free for it"
        )
    return room // each


def free_memory() -> int:
    """Bytes a process may still take: of the machine, or of its control group if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text != "max":
            free = min(free, max(0, int(text) - int(used.read_text())))
    return free
