"""Identity, load, tokenizer, event feed, metrics and the admin listener of a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from shared.blocks import Scope, chain_keys
from shared.events import BlocksStored, CacheCleared, EventBatch, Snapshot, decode_batch
from shared.load import WorkerInfo, WorkerLoad
from shared.render import byte_bundle, decode_bundle
from tests.workerrig import CHAT, COMPLETIONS, Client, chat, completion, error_of


@pytest.fixture
async def client(fake_worker: Any) -> AsyncIterator[Client]:
    async with Client(fake_worker.url) as made:
        yield made


class Feed:
    """Frames of ``/headwater/events``."""

    def __init__(self, response: httpx.Response) -> None:
        self._bytes = response.aiter_raw()
        self._buffer = b""

    async def frame(self) -> bytes:
        """The next frame's payload."""
        while len(self._buffer) < 4 or len(self._buffer) < 4 + self._size():
            self._buffer += await anext(self._bytes)
        size = self._size()
        payload, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
        return payload

    async def batch(self) -> EventBatch:
        """The next batch, keep-alives skipped."""
        while not (payload := await self.frame()):
            pass
        return decode_batch(payload)

    def _size(self) -> int:
        return int.from_bytes(self._buffer[:4], "little")


@asynccontextmanager
async def feed(client: Client, query: str = "") -> AsyncIterator[Feed]:
    async with client.http.stream("GET", f"/headwater/events{query}") as response:
        assert response.status_code == 200
        yield Feed(response)


def keys_after(batches: list[EventBatch]) -> set[int]:
    """What a snapshot and the batches after it add up to."""
    keys: set[int] = set()
    for event in (event for batch in batches for event in batch.events):
        if isinstance(event, Snapshot):
            keys = set(event.keys)
        elif isinstance(event, CacheCleared):
            keys.clear()
        elif isinstance(event, BlocksStored):
            keys |= set(event.keys)
        else:
            keys -= set(event.keys)
    return keys


async def test_info_and_tokenizer(client: Client) -> None:
    answer = await client.http.get("/headwater/info")
    info = msgspec.json.decode(answer.content, type=WorkerInfo)
    assert info.models == ("fake",)
    assert info.url == client.url
    assert f"http://{info.id}" == client.url
    assert (info.block_size, info.blocks_total, info.max_model_len) == (16, 512, 512 * 16)
    assert info.epoch < 2**63
    answer = await client.http.get("/headwater/tokenizer")
    assert answer.headers["content-type"] == "application/msgpack"
    bundle = decode_bundle(answer.content)
    assert bundle == byte_bundle()
    assert info.tokenizer == bundle.fingerprint
    tag = answer.headers["etag"]
    assert tag == f'"{bundle.fingerprint}"'
    again = await client.http.get("/headwater/tokenizer", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")


async def test_events_carry_the_keys_of_the_prompt(client: Client) -> None:
    info = msgspec.json.decode((await client.http.get("/headwater/info")).content, type=WorkerInfo)
    async with feed(client) as events:
        first = await events.batch()
        assert isinstance(first.events[0], Snapshot)
        assert (first.worker, first.epoch, first.source) == (info.id, info.epoch, "worker")
        text = "these are the tokens of a prompt that is announced block by block"
        await client.ask(COMPLETIONS, completion(text, max_tokens=1))
        scope = Scope(model="fake", tokenizer=info.tokenizer)
        expected = chain_keys(scope.root(b"headwater"), list(text.encode()))
        batches = [first]
        while not set(expected) <= keys_after(batches):
            batches.append(await asyncio.wait_for(events.batch(), 30))
        assert [batch.seq for batch in batches] == list(range(first.seq, first.seq + len(batches)))
        known = batches[-1].seq
    # A reader that comes back gets what it missed, and no snapshot.
    await client.ask(COMPLETIONS, completion("news " * 20, max_tokens=1))
    async with feed(client, f"?epoch={info.epoch}&after={known}") as events:
        batch = await events.batch()
        assert batch.seq == known + 1
        assert not isinstance(batch.events[0], Snapshot)
    for stale in (f"?epoch={info.epoch - 1}&after={known}", f"?epoch={info.epoch}&after=999999"):
        async with feed(client, stale) as events:
            batch = await events.batch()
            assert isinstance(batch.events[0], Snapshot)
            assert set(expected) <= keys_after([batch])
    assert (await client.http.get("/headwater/events?epoch=x")).status_code == 400


async def test_a_quiet_feed_is_kept_alive(client: Client) -> None:
    async with feed(client) as events:
        await events.batch()
        for _ in range(2):
            assert await asyncio.wait_for(events.frame(), 30) == b""


async def test_load_while_running(worker_process: Any) -> None:
    worker = worker_process(env={"HEADWATER_FAKE__DECODE_MS_PER_STEP": "20"})
    async with Client(worker.url) as client:
        body = chat("busy", max_tokens=60, ignore_eos=True)
        tasks = [asyncio.create_task(client.ask(CHAT, body)) for _ in range(3)]
        running = 0
        while running < 3:
            await asyncio.sleep(0.02)
            load = msgspec.json.decode(
                (await client.http.get("/headwater/load")).content, type=WorkerLoad
            )
            running = load.running
        assert load.blocks_used > 0
        assert load.blocks_total == 512
        assert not load.draining
        await asyncio.gather(*tasks)
        load = msgspec.json.decode(
            (await client.http.get("/headwater/load")).content, type=WorkerLoad
        )
        assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
        assert load.decode_tokens_per_s > 0


async def test_metrics(worker_process: Any) -> None:
    worker = worker_process()
    async with Client(worker.url) as client:
        text = "m" * 64
        for _ in range(2):
            await client.ask(COMPLETIONS, completion(text, max_tokens=3, ignore_eos=True))
        lines = (await client.http.get("/metrics")).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    name = "headwater_engine_"
    assert values[name + "running"] == values[name + "waiting"] == "0.0"
    assert values[name + 'kv_blocks{state="used"}'] == "0.0"
    assert float(values[name + 'kv_blocks{state="cached"}']) == 4
    assert float(values[name + 'kv_blocks{state="free"}']) == 508
    assert float(values[name + 'prefill_tokens_total{source="cached"}']) == 48
    assert float(values[name + 'prefill_tokens_total{source="computed"}']) == 64 + 16
    assert float(values[name + "decode_tokens_total"]) == 6
    assert float(values[name + "preemptions_total"]) == 0
    assert float(values[name + 'step_seconds_count{kind="prefill"}']) == 2
    assert float(values[name + "batch_tokens_count"]) == 6


async def test_flush_empties_the_cache_and_says_so(worker_process: Any) -> None:
    worker = worker_process()
    async with Client(worker.url) as client, Client(worker.admin_url) as admin:
        request = completion("flush me " * 10, max_tokens=1)
        await client.ask(COMPLETIONS, request)
        async with feed(client) as events:
            batches = [await events.batch()]
            assert keys_after(batches)
            before = (await admin.http.get("/admin/cache")).json()
            assert before["blocks"]["cached"] > 0
            assert before["hit_rate"] == 0
            answer = await admin.http.post("/admin/cache/flush")
            assert answer.json()["blocks_cached_before"] == before["blocks"]["cached"]
            batches.append(await asyncio.wait_for(events.batch(), 30))
            assert not keys_after(batches)
        again = await client.ask(COMPLETIONS, request)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await client.http.get("/admin/cache")).status_code == 404


async def test_admin_token_and_browsers(worker_process: Any) -> None:
    plain = worker_process()
    guarded = worker_process(env={"HEADWATER_SERVE__ADMIN_TOKEN": "t0ken"})
    async with Client(plain.admin_url) as admin:
        answer = await admin.http.post("/admin/cache/flush", headers={"Origin": "http://evil"})
        assert answer.status_code == 403
        error_of(answer)
    async with Client(guarded.admin_url) as admin:
        for headers in ({}, {"Authorization": "Bearer nope"}):
            for method, path in (("GET", "/admin/cache"), ("POST", "/admin/cache/flush")):
                answer = await admin.http.request(method, path, headers=headers)
                assert answer.status_code == 401
                error_of(answer)
        headers = {"Authorization": "Bearer t0ken"}
        assert (await admin.http.get("/admin/cache", headers=headers)).status_code == 200


async def test_without_prefix_cache(worker_process: Any) -> None:
    worker = worker_process("--no-prefix-cache", "--block-size", "1", "--kv-blocks", "600")
    async with Client(worker.url) as client:
        assert (await client.http.get("/headwater/info")).json()["prefix_cache"] is False
        for _ in range(2):
            body = await client.ask(COMPLETIONS, completion("none " * 20, max_tokens=1))
            assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
