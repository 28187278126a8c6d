"""The admin listener against strangers: addresses it may not be sent to, and web pages."""

from __future__ import annotations

import pytest
from rig import RawClient, ask

from gateway.discovery.allowed import is_allowed
from gateway.feeds.tending import Tender

WORKERS = "/admin/workers"
REFUSED = [
    "http://169.254.169.254/",
    "http://169.254.1.1:8000",
    "http://[::ffff:169.254.169.254]/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://[2002:a9fe:a9fe::]/",
    "http://0xa9fea9fe/",
    "http://2852039166/",
    "http://0.0.0.0:8000",
    "http://[::]:8000",
    "http://[fe80::1]/",
    "http://[fd00:ec2::254]/",
    "http://100.100.100.200/",
    "http://224.0.0.1/",
    "http://user:CANARY@127.0.0.1:1/",
    "http://CANARY@127.0.0.1:1/",
    "file:///x",
    "gopher://h",
    "http://",
    "http://" + "a" * 300,
    "http://\u00df\u2028",
    "http://..",
]


@pytest.mark.parametrize("url", REFUSED)
async def test_addresses_without_workers_are_not_contacted(
    stub, serve, log, monkeypatch, url
) -> None:
    served = await serve(await stub())
    contacted: list[str] = []

    async def introduce(_self: Tender, url: str) -> tuple[None, str]:
        contacted.append(url)
        return None, "contacted"

    monkeypatch.setattr(Tender, "introduce", introduce)
    reply = await ask(served.admin, WORKERS, {"url": url})
    assert reply.status == 400
    assert reply.json["error"]["param"] == "url"
    assert "CANARY" not in reply.body.decode() + log.getvalue()
    assert contacted == []


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.7", "192.168.1.1", "::1", "fd00::1", "8.8.8.8", "2001:db8::1"]
)
def test_addresses_of_workers(address: str) -> None:
    assert is_allowed(address)


FOREIGN = [
    [("Origin", "http://evil.example")],
    [("Origin", "null")],
    [("Origin", "http://127.0.0.1")],
    [("Origin", "http://[bad")],
    [("Sec-Fetch-Site", "cross-site")],
    [("Sec-Fetch-Site", "same-site")],
    [("Host", "evil.example"), ("Origin", "http://evil.example")],
    [("Host", "evil.example:8001")],
    [("Host", "127.0.0.1.evil.example")],
]


async def raw(url: str, method: str, path: str, headers: list[tuple[str, str]]) -> int:
    """Status of a request with exactly these headers."""
    client = await RawClient.connect(url)
    named = dict(headers)
    host = named.pop("Host", url.removeprefix("http://"))
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Length: 0"]
    lines += [f"{name}: {value}" for name, value in named.items()]
    client.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    reply = await client.read()
    client.close()
    return reply.status


@pytest.mark.parametrize("headers", FOREIGN)
async def test_foreign_pages_change_and_read_nothing(stub, serve, headers) -> None:
    worker = await stub()
    served = await serve(worker)
    target = f"{WORKERS}/{worker.id}"
    for method, path in (
        ("POST", f"{target}/drain"), ("DELETE", target), ("POST", WORKERS),
        ("GET", WORKERS), ("GET", "/metrics"),
    ):  # fmt: skip
        assert await raw(served.admin, method, path, headers) == 403
    assert served.gateway.router.workers(0.0)[0].state.value == "ready"


async def test_own_pages_and_tools_are_let_in(stub, serve) -> None:
    served = await serve(await stub())
    own = served.admin.removeprefix("http://")
    for headers in (
        [], [("Origin", f"http://{own}"), ("Sec-Fetch-Site", "same-origin")],
        [("Host", "localhost:1")], [("Host", "gateway")], [("Host", "[::1]:8001")],
        [("Sec-Fetch-Site", "none")],
    ):  # fmt: skip
        assert await raw(served.admin, "GET", WORKERS, headers) == 200


async def test_with_a_token_any_name_will_do(stub, serve) -> None:
    served = await serve(await stub(), **{"listen.admin_token": "t"})
    headers = [("Host", "admin.example"), ("Authorization", "Bearer t")]
    assert await raw(served.admin, "GET", WORKERS, headers) == 200
    assert await raw(served.admin, "GET", WORKERS, headers[:1]) == 401
    assert (await ask(served.admin, WORKERS)).status == 401
