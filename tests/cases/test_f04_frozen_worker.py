"""F04 and B10 with a process that stands still: it takes connections and answers nothing.

Nobody counts it as ready, whoever can serve does, and it is taken in again without a restart.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest
from caserig import check_error, settles
from conftest import RedisServer, WorkerLauncher
from redisload import await_known, body, exact, placed, warm
from rig import CHAT, ask, eventually

pytestmark = pytest.mark.redis
NOTICED_S = 30.0
QUICK = {"workers.health_timeout_s": 1.0, "workers.connect_timeout_s": 2.0}


@pytest.mark.parametrize("road", ["redis", "http"])
async def test_a_worker_that_stands_still(
    serve,
    worker_process: WorkerLauncher,
    redis_server_factory: Callable[..., RedisServer],
    road: str,
) -> None:
    url = redis_server_factory("newest").url if road == "redis" else "none"
    workers = [worker_process("--redis", url, wait=False) for _ in range(2)]
    for worker in workers:
        await asyncio.to_thread(worker.await_ready)
    listed = {} if road == "redis" else {"workers.urls": ",".join(w.url for w in workers)}
    flags = {**QUICK, **listed, "redis.url": url, "redis.timeout_ms": 10_000}
    gateways = [await serve(wait=False, **flags) for _ in range(2)]
    for gateway in gateways:
        await eventually(exact(gateway, 2, ""), 60)
    homes = await warm(gateways[0].url, [f"F04 {n}" for n in range(8)])
    frozen = workers[0]
    name, other = (worker.url.removeprefix("http://") for worker in workers)

    frozen.process.send_signal(signal.SIGSTOP)
    try:
        for gateway in gateways:
            # Also of prompts that it has in its cache.
            replies = await asyncio.gather(*(ask(gateway.url, CHAT, body(seed)) for seed in homes))
            assert {placed(reply)[0] for reply in replies} == {other}
            await eventually(lambda g=gateway: out(g, name), NOTICED_S)
            assert (await ask(gateway.url, "/ready")).status == 200
        workers[1].process.send_signal(signal.SIGSTOP)
        for gateway in gateways:

            async def unready(url: str = gateway.url) -> bool:
                return (await ask(url, "/ready")).status == 503

            await settles(unready, NOTICED_S)
            check_error(await ask(gateway.url, CHAT, body("nobody")), 503)
    finally:
        for worker in workers:
            worker.process.send_signal(signal.SIGCONT)

    for gateway in gateways:
        await eventually(exact(gateway, 2, ""), 30)
        for seed, home in list(homes.items())[:3]:
            await await_known(gateway, seed, home, 20)
            worker, matched, cached = placed(await ask(gateway.url, CHAT, body(seed)))
            assert matched <= cached, worker


def out(served, name: str) -> bool:
    """Whether a worker gets nothing."""
    found = [w for w in served.gateway.router.workers(0.0) if str(w.id) == name]
    return not found or bool(found[0].reason)
