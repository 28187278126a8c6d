"""Host memory end to end: workers as processes, gateways that predict what they will deliver."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from caserig import GatewayLauncher
from cases.conftest import gateway_process

__all__ = ["gateway_process"]

pytestmark = pytest.mark.redis
QUICK_COPIES = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "400",
    "HEADWATER_FAKE__COPY_US_PER_BLOCK": "5",
}
FLAGS = ("--kv-blocks", "60", "--host-blocks", "300")


def body(prompt: str) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, "max_tokens": 2, "temperature": 0}


def test_predicted_is_delivered_on_both_tiers_and_a_late_gateway_knows_both(
    worker_process: Any, gateway_process: GatewayLauncher, redis_server: Any
) -> None:
    rng = random.Random(1)
    prompts = ["".join(rng.choices("abcdefgh ", k=400)) for _ in range(12)]
    workers = [
        worker_process(*FLAGS, "--redis", redis_server.url, env=QUICK_COPIES, wait=False)
        for _ in range(2)
    ]
    for worker in workers:
        worker.await_ready()
    gateway = gateway_process(redis=redis_server.url)
    gateway.await_exact(2)
    with httpx.Client(timeout=30, trust_env=False) as client:
        for _ in range(3):
            for prompt in rng.sample(prompts, len(prompts)):
                answer = client.post(f"{gateway.url}/v1/completions", json=body(prompt))
                assert answer.status_code == 200, answer.text
                told = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert told == int(answer.headers["x-headwater-matched-tokens"])
        loaded = [
            client.get(f"{each.admin_url}/admin/cache").json()["prompt_tokens"]["from_host"]
            for each in workers
        ]
    assert sum(loaded) > 10 * 16
    late = gateway_process(redis=redis_server.url)
    late.await_exact(2)
    for each in gateway.workers():
        other = late.worker(each["id"])
        assert other["index_blocks"] == each["index_blocks"]
        assert other["index_host_blocks"] == each["index_host_blocks"]
    assert sum(each["index_host_blocks"] for each in late.workers()) > 50
    assert [gateway.explain(body(p)) for p in prompts] == [late.explain(body(p)) for p in prompts]


async def test_a_feed_without_redis_begins_with_both_tiers(
    worker_process: Any, gateway_process: GatewayLauncher
) -> None:
    rng = random.Random(2)
    prompts = ["".join(rng.choices("abcdefgh ", k=400)) for _ in range(8)]
    worker = await asyncio.to_thread(worker_process, *FLAGS, env=QUICK_COPIES)
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for prompt in prompts:
            await client.post(f"{worker.url}/v1/completions", json=body(prompt))
        cache = (await client.get(f"{worker.admin_url}/admin/cache")).json()
        assert cache["host_blocks"]["used"] > 100
        assert cache["host_blocks"]["used"] == cache["host_blocks"]["moved_out"]
        assert cache["lifetimes"]["age_s"]["count"] == cache["host_blocks"]["moved_out"]
        metrics = (await client.get(f"{worker.url}/metrics")).text
        used = cache["host_blocks"]["used"]
        assert f'headwater_engine_host_blocks{{state="used"}} {used}.0' in metrics
        assert f"headwater_engine_block_lifetime_seconds_count {used}.0" in metrics
        assert 'headwater_engine_block_idle_before_evict_seconds_bucket{le="+Inf"}' in metrics
    gateway = await asyncio.to_thread(gateway_process, worker.url)
    await asyncio.to_thread(gateway.await_exact, 1)
    (known,) = await asyncio.to_thread(gateway.workers)
    assert known["index_host_blocks"] == cache["host_blocks"]["used"]
    matched = [(await asyncio.to_thread(gateway.explain, body(p)))[known["id"]] for p in prompts]
    assert min(matched) >= 24 * 16
