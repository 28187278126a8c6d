"""The background side without Redis, against real sockets."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from gateway.discovery.base import Source
from shared.errors import BadRequest


async def test_a_static_worker_joins_and_its_cache_becomes_known(kit, stand_in) -> None:
    worker = await stand_in()
    await worker.store(1, 2, 3)
    async with kit.running(kit.settings("none", worker.url)) as gateway:
        await kit.until(lambda: gateway.router.exact(worker.name, "from the worker"))
        assert gateway.router.holds(worker.name, {1, 2, 3})
        assert gateway.router.health[worker.name] is True
        await worker.store(4)
        await worker.evict(2)
        await kit.until(lambda: gateway.router.holds(worker.name, {1, 3, 4}))
        assert gateway.stats.gaps == 0
        assert gateway.stats.http_resyncs == 1
        assert not gateway.stats.redis_configured


async def test_a_restart_on_the_same_address_empties_what_was_known(kit, stand_in) -> None:
    worker = await stand_in()
    await worker.store(1, 2, 3)
    async with kit.running(kit.settings("none", worker.url)) as gateway:
        for round_ in range(5):
            await kit.until(lambda: gateway.router.exact(worker.name))
            await kit.until(lambda: gateway.router.holds(worker.name, worker.contents))
            await worker.die()
            worker.begin_again()
            await worker.listen()
            took = await kit.until(
                lambda: gateway.router.infos[worker.name].epoch == worker.epoch, 3
            )
            assert took < 1.0
            assert gateway.router.index.blocks(worker.name) == 0
            await worker.store(10 + round_)


async def test_a_refused_connection_is_noticed_within_a_second(kit, stand_in) -> None:
    worker = await stand_in()
    config = kit.settings("none", worker.url, health_interval_s=1.0)
    async with kit.running(config) as gateway:
        await kit.until(lambda: gateway.router.health.get(worker.name))
        await worker.die()
        took = await kit.until(lambda: gateway.router.health[worker.name] is False)
        assert took < 1.8  # a second probe would come after two seconds


async def test_a_hung_worker_is_down_and_delays_nobody(kit, stand_in) -> None:
    hung, well = await stand_in(), await stand_in()
    async with kit.running(kit.settings("none", hung.url, well.url)) as gateway:
        await kit.until(lambda: gateway.router.health.get(hung.name))
        await kit.until(lambda: gateway.router.health.get(well.name))
        hung.hang = True
        took = await kit.until(lambda: gateway.router.health[hung.name] is False, 5)
        assert took < 2.4  # two late probes in a row
        before = well.requests.count("/headwater/load")
        took = await kit.until(lambda: well.requests.count("/headwater/load") >= before + 3)
        assert took < 1.5  # behind the other one they would take twice as long
        hung.hang = False
        await kit.until(lambda: gateway.router.health[hung.name] is True, 3)


async def test_not_ready_is_not_healthy_and_draining_is_its_own_state(kit, stand_in) -> None:
    worker = await stand_in()
    worker.ready = False
    async with kit.running(kit.settings("none", worker.url)) as gateway:
        await kit.until(lambda: gateway.router.health.get(worker.name) is False)
        worker.ready = True
        await kit.until(lambda: gateway.router.health[worker.name] is True)
        worker.load = type(worker.load)(draining=True)
        await kit.until(lambda: worker.name in gateway.router.draining)
        worker.ready = False
        await asyncio.sleep(0.7)
        assert gateway.router.health[worker.name] is True, "it still answers what it has begun"
        worker.load = type(worker.load)()
        await kit.until(lambda: worker.name not in gateway.router.draining)
        await kit.until(lambda: gateway.router.health[worker.name] is False)


async def test_workers_can_be_added_and_removed_by_hand(kit, stand_in, free_port) -> None:
    worker = await stand_in()
    await worker.store(5)
    async with kit.running(kit.settings()) as gateway:
        assert await gateway.feeds.add_worker(worker.url) == worker.name
        await kit.until(lambda: gateway.router.holds(worker.name, {5}))
        # The same worker under another address is no second one.
        again = worker.url.replace("127.0.0.1", "localhost")
        assert await gateway.feeds.add_worker(again) == worker.name
        assert list(gateway.router.infos) == [worker.name]
        assert gateway.feeds.remove_worker(worker.name)
        assert not gateway.feeds.remove_worker(worker.name)
        assert gateway.router.left == [(worker.name, "removed")]
        await asyncio.sleep(0.5)
        assert gateway.router.infos == {}


class Foreign:
    """An OpenAI server that knows nothing of us."""

    def __init__(self, port: int) -> None:
        self.port, self.models, self.ill = port, ["a", "b"], False
        self.runner: web.AppRunner | None = None

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": model, "object": "model", "max_model_len": 99} for model in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=500 if self.ill else 200)


async def test_a_foreign_server_is_known_by_its_models(kit, free_port) -> None:
    server = Foreign(free_port())
    await server.listen()
    name = f"127.0.0.1:{server.port}"
    try:
        async with kit.running(kit.settings("none", f"http://{name}")) as gateway:
            router = gateway.router
            await kit.until(lambda: router.health.get(name))
            first = router.infos[name]
            assert (first.engine, first.models, first.event_feed) == ("openai", ("a", "b"), False)
            assert first.max_model_len == 99
            await kit.until(lambda: router.trust.get(name) == ("learned", "no event feed"))
            server.models = ["b"]
            took = await kit.until(lambda: router.infos[name].models == ("b",))
            assert took < 1.5
            assert router.infos[name].epoch == first.epoch
            server.ill = True
            await kit.until(lambda: router.health[name] is False)
            server.ill = False
            await kit.until(lambda: router.health[name] is True)
            assert router.infos[name].epoch == first.epoch, "ill is not restarted"
            await server.runner.cleanup()
            await kit.until(lambda: router.health[name] is False)
            await server.listen()
            await kit.until(lambda: router.health[name] is True)
            assert router.infos[name].epoch != first.epoch
    finally:
        await server.runner.cleanup()


@pytest.mark.parametrize(
    ("info", "models", "reason"),
    [
        ((200, "<html>"), (200, "<html>"), "/v1/models cannot be read"),
        ((200, '{"epoch": "x"}'), (200, "{}"), "/headwater/info cannot be read"),
        ((503, ""), (200, '{"data": []}'), "/headwater/info answered 503"),
        ((404, ""), (401, ""), "/v1/models answered 401"),
        ((302, ""), (302, ""), "/v1/models answered 302"),
    ],
)
async def test_who_is_no_worker_is_told_why(kit, free_port, info, models, reason) -> None:
    def answer(status: int, text: str):
        async def handle(request: web.Request) -> web.Response:
            return web.Response(status=status, text=text, headers={"location": "/v1/models"})

        return handle

    app = web.Application()
    app.router.add_get("/headwater/info", answer(*info))
    app.router.add_get("/v1/models", answer(*models))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with kit.running(kit.settings()) as gateway:
        with pytest.raises(BadRequest, match=reason):
            await gateway.feeds.add_worker(f"http://127.0.0.1:{port}")
        assert gateway.router.infos == {}
    await runner.cleanup()


async def test_add_worker_refuses_what_is_no_url_and_who_is_not_there(kit, free_port) -> None:
    async with kit.running(kit.settings()) as gateway:
        for url in ("nonsense", "ftp://h:1"):
            with pytest.raises(BadRequest, match="http://host:port"):
                await gateway.feeds.add_worker(url)
        with pytest.raises(BadRequest, match="no worker at"):
            await gateway.feeds.add_worker(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("source", [s for s in Source if s is not Source.STATIC])
@pytest.mark.parametrize("url", ["http://169.254.169.254", "http://[fe80::1]:80", "http://0.0.0.0"])
async def test_no_source_leads_to_an_address_without_workers(kit, source: Source, url: str) -> None:
    async with kit.running(kit.settings()) as gateway:
        gateway.feeds._tender.add(url, source)

        def refused() -> bool:
            return all("are refused" in one.reason for one in gateway.feeds.outsiders())

        await kit.until(lambda: gateway.feeds.outsiders() and refused(), 20.0)
