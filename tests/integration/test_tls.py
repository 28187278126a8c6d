"""TLS and certificates of clients on the hops: client to gateway, gateway to worker."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import WorkerLauncher, WorkerProcess
from redisrig import Certificates, certificates
from rig import CHAT, chat, eventually

from gateway.build import Gateway
from gateway.config import GatewayConfig
from gateway.openers import check_config
from shared.errors import ConfigError
from shared.settings import load

FAST: dict[str, Any] = {
    "listen.port": 0,
    "listen.admin_port": 0,
    "workers.health_interval_s": 0.2,
    "workers.health_timeout_s": 5.0,
    "workers.connect_timeout_s": 5.0,
}


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of another authority."""
    return certificates(tmp_path_factory.mktemp("strangers"))


@pytest.fixture(scope="module")
def worker(
    papers: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """One that wants a certificate from whoever calls it."""
    launcher = WorkerLauncher(tmp_path_factory.mktemp("worker"))
    flags = {
        "TLS_CERT": str(papers.server),
        "TLS_KEY": str(papers.server_key),
        "TLS_CLIENT_CA": str(papers.authority),
    }
    yield launcher(env={f"HEADWATER_SERVE__{name}": value for name, value in flags.items()})
    launcher.end()


def configured(worker: WorkerProcess, **settings: Any) -> GatewayConfig:
    url = worker.url.replace("http://", "https://")
    flags = {**FAST, "workers.urls": url, **{key: str(v) for key, v in settings.items()}}
    return load(GatewayConfig, file=None, env={}, flags=flags)


def shown(papers: Certificates) -> dict[str, Any]:
    """What a gateway shows to workers."""
    return {
        "workers.tls_ca": papers.authority,
        "workers.tls_cert": papers.client,
        "workers.tls_key": papers.client_key,
    }


def caller(papers: Certificates, *, known: bool = True) -> httpx.AsyncClient:
    """A client that trusts the authority; ``known``: and has a certificate of it."""
    context = ssl.create_default_context(cafile=str(papers.authority))
    if known:
        context.load_cert_chain(papers.client, papers.client_key)
    return httpx.AsyncClient(verify=context, trust_env=False, timeout=30)


@pytest.mark.parametrize("http_client", ["httptools", "aiohttp"])
async def test_every_hop_is_encrypted_and_each_side_shows_who_it_is(
    worker: WorkerProcess, papers: Certificates, http_client: str
) -> None:
    listen = {
        "listen.tls_cert": papers.server,
        "listen.tls_key": papers.server_key,
        "listen.tls_client_ca": papers.authority,
        "workers.http_client": http_client,
    }
    gateway = Gateway(configured(worker, **listen, **shown(papers)))
    try:
        await gateway.start()
        assert gateway.url.startswith("https://127.0.0.1:")
        await eventually(lambda: gateway.router.ready()[0], 30)
        async with caller(papers) as client:
            for stream in (False, True):
                body = {**chat(), "model": "fake", "max_tokens": 3, "stream": stream}
                answer = await client.post(f"{gateway.url}{CHAT}", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.text.rstrip().endswith("[DONE]") is stream
            large = {**chat("x" * 3_000_000), "model": "fake"}
            answer = await client.post(f"{gateway.url}{CHAT}", json=large)
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        async with caller(papers, known=False) as client:
            with pytest.raises(httpx.TransportError):  # TLS 1.3 tells it with the first read
                await client.get(f"{gateway.url}/health")
            admin = await client.get(f"{gateway.admin_url}/metrics")  # it has a token instead
            assert admin.status_code == 200
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"{gateway.url}/health")
            with pytest.raises(httpx.TransportError):
                await client.get(gateway.url.replace("https", "http") + "/health")
    finally:
        await gateway.close()


@pytest.mark.parametrize("fault", ["no certificate", "unknown worker", "unknown gateway"])
async def test_a_gateway_and_a_worker_that_do_not_trust_each_other_do_not_talk(
    worker: WorkerProcess, papers: Certificates, strangers: Certificates, fault: str
) -> None:
    settings = shown(papers)
    if fault == "no certificate":
        settings = {"workers.tls_ca": papers.authority}
    elif fault == "unknown worker":
        settings["workers.tls_ca"] = strangers.authority
    else:
        settings |= {**shown(strangers), "workers.tls_ca": papers.authority}
    gateway = Gateway(configured(worker, **settings))
    try:
        await gateway.start()
        await eventually(lambda: gateway.feeds.stats is not None and said(gateway), 30)
        assert not gateway.router.ready()[0]
    finally:
        await gateway.close()


def said(gateway: Gateway) -> bool:
    """It has tried, and tells what is wrong."""
    reasons = " ".join(gateway.readiness().reasons)
    return "https://" in reasons and "not asked yet" not in reasons and "probed" not in reasons


async def test_new_certificates_are_shown_after_a_reload(
    worker: WorkerProcess, papers: Certificates, strangers: Certificates, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(papers: Certificates) -> None:
        shutil.copy(papers.server, cert)
        shutil.copy(papers.server_key, key)

    install(papers)
    config = configured(worker, **{"listen.tls_cert": cert, "listen.tls_key": key})
    gateway = Gateway(config)
    try:
        await gateway.start()
        for authority in (papers, strangers):
            install(authority)
            await gateway.reload(config)
            async with caller(authority, known=False) as client:
                assert (await client.get(f"{gateway.url}/health")).status_code == 200
        key.write_text("junk")
        with pytest.raises(ConfigError, match=r"listen\.tls_cert"):
            await gateway.reload(config)
        async with caller(strangers, known=False) as client:
            assert (await client.get(f"{gateway.url}/health")).status_code == 200
    finally:
        await gateway.close()


async def test_who_says_nothing_holds_up_nobody(
    worker: WorkerProcess, papers: Certificates
) -> None:
    listen = {"listen.tls_cert": papers.server, "listen.tls_key": papers.server_key}
    gateway = Gateway(configured(worker, **listen))
    writers = []
    try:
        await gateway.start()
        port = int(gateway.url.rsplit(":", 1)[1])
        for sent in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 600):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            writers.append(writer)
        async with caller(papers, known=False) as client:
            assert (await client.get(f"{gateway.url}/health")).status_code == 200
    finally:
        for writer in writers:
            writer.close()
        await gateway.close()


def test_files_that_are_of_no_use(papers: Certificates, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("CANARY")
    good = {"tls_cert": str(papers.server), "tls_key": str(papers.server_key)}
    cases: list[tuple[str, dict[str, str]]] = [
        ("listen", {"tls_cert": good["tls_cert"]}),
        ("listen", {"tls_key": good["tls_key"]}),
        ("listen", {**good, "tls_key": str(papers.client_key)}),
        ("listen", {**good, "tls_cert": "/nowhere"}),
        ("listen", {**good, "tls_cert": str(junk)}),
        ("listen", {**good, "tls_client_ca": str(junk)}),
        ("listen", {"tls_client_ca": str(papers.authority)}),
        ("workers", {"tls_ca": "/nowhere"}),
        ("workers", {"tls_ca": str(junk)}),
        ("workers", {"tls_cert": good["tls_cert"]}),
    ]
    for section, settings in cases:
        flags = {f"{section}.{name}": value for name, value in settings.items()}
        with pytest.raises(ConfigError, match=rf"^{section}\.tls_") as failure:
            check_config(load(GatewayConfig, file=None, env={}, flags=flags))
        assert "CANARY" not in str(failure.value)
        assert "\n" not in str(failure.value)
