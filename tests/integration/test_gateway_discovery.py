"""Workers that come and go while the gateway runs, from every kind of list."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kubestub import KubeStub, endpoint, slice_of
from rig import eventually

from gateway.routing.base import WorkerState


async def get(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json()


async def text(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


async def call(method: str, url: str) -> int:
    async with aiohttp.ClientSession() as session, session.request(method, url) as response:
        return response.status


async def ask(url: str, model: str = "m") -> tuple[int, str | None]:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        return response.status, response.headers.get("x-headwater-worker")


def ready(served: Any) -> set[str]:
    found = served.gateway.router.workers(0.0)
    return {str(w.id) for w in found if w.state is WorkerState.READY}


def write(path: Path, *workers: Any) -> None:
    path.write_text(json.dumps({"workers": workers}))


async def test_a_file_adds_drains_and_removes(serve: Any, stub: Any, tmp_path: Path) -> None:
    one, two, path = await stub(), await stub(models=("n",)), tmp_path / "workers.json"
    write(path, one.url)
    served = await serve(**{"discovery.file.path": str(path), "discovery.file.interval_s": 0.05})
    await eventually(lambda: ready(served) == {one.id}, 20.0)
    write(path, one.url, two.url)
    await eventually(lambda: ready(served) == {one.id, two.id}, 20.0)
    assert await ask(served.url, "n") == (200, two.id)  # several models behind one gateway
    write(path, {"url": one.url, "drain": True}, two.url)
    await eventually(lambda: ready(served) == {two.id}, 20.0)
    assert (await ask(served.url))[0] == 503
    listed = (await get(f"{served.admin}/admin/workers"))["workers"]
    [drained] = [w for w in listed if w["id"] == one.id]
    assert (drained["state"], drained["sources"]) == ("draining", ["file"])
    assert "workers' file" in drained["reason"]
    write(path, one.url, two.url)
    await eventually(lambda: ready(served) == {one.id, two.id}, 20.0)
    path.write_text("{")
    await eventually(lambda: any("discovery.file" in n for n in served.gateway.readiness().notes))
    assert 'headwater_discovery_up{source="file"} 0.0' in await text(f"{served.admin}/metrics")
    assert ready(served) == {one.id, two.id}
    write(path, two.url)
    await eventually(lambda: ready(served) == {two.id}, 20.0)
    assert (await get(f"{served.admin}/admin/workers"))["lists"][0]["workers"] == 1


async def test_an_operators_drain_is_not_lifted_by_a_list(
    serve: Any, stub: Any, tmp_path: Path
) -> None:
    one, path = await stub(), tmp_path / "workers.json"
    write(path, {"url": one.url, "drain": True})
    served = await serve(**{"discovery.file.path": str(path), "discovery.file.interval_s": 0.05})
    status = served.gateway.router.workers
    await eventually(lambda: [w.state for w in status(0.0)] == [WorkerState.DRAINING], 20.0)
    assert await call("POST", f"{served.admin}/admin/workers/{one.id}/drain") == 200
    write(path, one.url)
    probes = one.probes
    await eventually(lambda: one.probes > probes + 4, 20.0)
    assert ready(served) == set()
    assert await call("POST", f"{served.admin}/admin/workers/{one.id}/undrain") == 200
    assert ready(served) == {one.id}


async def test_one_worker_named_by_three_lists_is_one(
    serve: Any, stub: Any, tmp_path: Path
) -> None:
    one, path = await stub(), tmp_path / "workers.json"
    write(path, one.url)
    served = await serve(
        one,
        **{
            "discovery.file.path": str(path),
            "discovery.file.interval_s": 0.05,
            "discovery.dns.urls": f"http://127.0.0.1:{one.port}",
            "discovery.dns.interval_s": 0.05,
        },
    )

    async def sources() -> list[str]:
        [worker] = (await get(f"{served.admin}/admin/workers"))["workers"]
        return list(worker["sources"])

    await eventually(lambda: len(served.gateway.feeds.named_by(one.id)) == 3, 20.0)
    assert await sources() == ["dns", "file", "static"]
    write(path)
    await eventually(lambda: len(served.gateway.feeds.named_by(one.id)) == 2, 20.0)
    assert ready(served) == {one.id}


async def test_removed_by_hand_it_stays_away(serve: Any, stub: Any, tmp_path: Path) -> None:
    one = await stub()
    served = await serve(
        **{
            "discovery.dns.urls": f"http://localhost:{one.port}",
            "discovery.dns.interval_s": 0.05,
        }
    )
    await eventually(lambda: one.id in ready(served), 20.0)
    assert await call("DELETE", f"{served.admin}/admin/workers/{one.id}") == 200
    await eventually(lambda: served.gateway.feeds.lists()[0].told_at is not None)
    before = one.probes
    told = served.gateway.feeds.lists()[0].told_at
    await eventually(lambda: served.gateway.feeds.lists()[0].told_at > told + 0.2, 20.0)
    assert ready(served) == set()
    assert one.probes <= before + 2  # what was under way


@pytest.fixture
async def api() -> AsyncIterator[KubeStub]:
    made = KubeStub()
    await made.start()
    yield made
    await made.stop()


async def test_endpoint_slices_end_to_end(
    serve: Any, stub: Any, api: KubeStub, tmp_path: Path
) -> None:
    one, two = await stub(), await stub()

    def part(made: Any, **state: Any) -> dict[str, Any]:
        port = [{"name": "http", "protocol": "TCP", "port": made.port}]
        return slice_of(f"s{made.port}", endpoint("127.0.0.1", pod=made.id, **state), ports=port)

    api.put(part(one))
    api.put(part(two))
    served = await serve(
        **{
            "discovery.kubernetes.services": "vllm",
            "discovery.kubernetes.namespace": "llm",
            "discovery.kubernetes.api": api.url,
            "discovery.kubernetes.token_file": str(tmp_path / "none"),
        }
    )
    await eventually(lambda: ready(served) == {one.id, two.id}, 20.0)
    api.put(part(one, ready=False, serving=True, terminating=True))
    await eventually(lambda: ready(served) == {two.id}, 20.0)
    api.delete(f"s{one.port}")
    await eventually(lambda: [str(w.id) for w in served.gateway.router.workers(0)] == [two.id])
    api.status = 500
    api.cut()
    await eventually(lambda: bool(served.gateway.feeds.lists()[0].fault), 20.0)
    assert ready(served) == {two.id}


async def test_a_worker_that_never_answered_is_listed_with_its_reason(
    serve: Any, free_port: Any
) -> None:
    port = free_port()
    served = await serve(wait=False, **{"workers.urls": f"http://127.0.0.1:{port}"})
    name = f"127.0.0.1:{port}"

    def known() -> bool:
        return any("connect" in w.reason for w in served.gateway.feeds.outsiders())

    await eventually(known, 20.0)
    [worker] = (await get(f"{served.admin}/admin/workers"))["workers"]
    assert (worker["id"], worker["state"], worker["sources"]) == (name, "down", ["static"])
    assert "connect" in worker["reason"]
    metrics = await text(f"{served.admin}/metrics")
    assert f'headwater_worker_state{{state="down",worker="{name}"}} 1.0' in metrics
    assert await call("DELETE", f"{served.admin}/admin/workers/{name}") == 200
    assert (await get(f"{served.admin}/admin/workers"))["workers"] == []


async def test_a_list_cannot_lead_to_a_metadata_address(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    write(path, "http://169.254.169.254", "http://[fe80::1]:8000")
    served = await serve(wait=False, **{"discovery.file.path": str(path)})
    await eventually(lambda: len(served.gateway.feeds.outsiders()) == 2, 20.0)
    await eventually(
        lambda: all("are refused" in w.reason for w in served.gateway.feeds.outsiders()), 20.0
    )
