"""E01: nobody without the admin token changes the fleet, and nobody points it at odd addresses."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from rig import CHAT, Seen, ask, chat, completion, plain

from gateway.discovery.allowed import CheckedResolver
from gateway.upstream import Timeouts, UpstreamConnectError

TOKEN = "the-admin-token"
KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    "wrong": (("Authorization", "Bearer wrong"),),
    "a user's": (("Authorization", "Bearer user-key"),),
    "prefix": (("Authorization", f"Bearer {TOKEN[:-1]}"),),
    "other scheme": (("Authorization", f"Basic {TOKEN}"),),
}
ADMIN = (("Authorization", f"Bearer {TOKEN}"),)
ODD_URLS = [
    "http://169.254.169.254/",
    "http://[::ffff:169.254.169.254]/",
    "http://[fe80::1]/",
    "http://[::ffff:0:a9fe:a9fe]/",
    "http://[2001:db8::5efe:a9fe:a9fe]/",
    "http://[2001:db8::200:5efe:169.254.169.254]/",
    "http://255.255.255.255/",
    "http://0.0.0.0:1/",
    "file:///x",
    "gopher://h",
    "http://user:pw@h/",
    "http://h/?x",
    "h:1",
    "",
]


def routes(worker: str) -> list[tuple[str, str, Any]]:
    """Every route that shows or changes something."""
    return [
        ("GET", "/admin/workers", None),
        ("POST", "/admin/workers", {"url": "http://127.0.0.1:9"}),
        ("POST", f"/admin/workers/{worker}/drain", {}),
        ("POST", f"/admin/workers/{worker}/undrain", {}),
        ("DELETE", f"/admin/workers/{worker}", None),
        ("POST", "/admin/explain", chat()),
        ("GET", "/admin/report", None),
        ("GET", "/metrics", None),
    ]


@pytest.mark.parametrize("key", KEYS)
async def test_without_the_token_nothing_is_shown_or_changed(stub, serve, key: str) -> None:
    worker = await stub()
    settings = {"listen.admin_token": TOKEN, "listen.api_keys": "user-key"}
    served = await serve(worker, **settings)
    before = (await ask(served.admin, "/admin/workers", None, *ADMIN)).json["workers"]
    for method, path, body in routes(worker.id):
        reply = await ask(served.admin, path, body, *KEYS[key], method=method)
        assert reply.status in (401, 403), (method, path, reply.status)
        assert reply.json["error"]["message"]
    after = (await ask(served.admin, "/admin/workers", None, *ADMIN)).json["workers"]
    assert [(w["id"], w["state"]) for w in after] == [(w["id"], w["state"]) for w in before]
    public = await ask(served.url, "/admin/workers", {"url": worker.url}, *ADMIN)
    assert public.status in (401, 403, 404, 405), "not on the public port at all"


@pytest.mark.parametrize("url", ODD_URLS)
async def test_odd_addresses_are_refused(stub, serve, url: str) -> None:
    served = await serve(await stub())
    reply = await ask(served.admin, "/admin/workers", {"url": url})
    assert reply.status == 400, reply.body
    assert b"no worker at" not in reply.body, "nobody was asked"
    assert b"pw" not in reply.body
    assert len((await ask(served.admin, "/admin/workers")).json["workers"]) == 1


async def test_redirects_are_not_followed(stub, serve) -> None:
    """Neither by probes nor by requests."""
    target, good = await stub(), await stub()
    served = await serve(good)
    away = await stub()
    away.probe = lambda seen: plain(b"", 307, ("Location", f"{target.url}{seen.target}"))
    await ask(served.admin, "/admin/workers", {"url": away.url})
    await asyncio.sleep(1.0)
    assert target.probes == 0

    def redirect(seen: Seen) -> Any:
        return plain(b"", 307, ("Location", f"{target.url}{CHAT}"))

    good.respond = redirect
    reply = await ask(served.url, CHAT, chat())
    assert reply.status == 502
    assert reply.header("location") is None
    assert target.seen == []


class Rebound:
    """A name that led to a worker when it was asked for, and leads elsewhere since."""

    NAME = "worker.attacker.test"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address = "127.0.0.1"
        self.asked: list[str] = []
        real = socket.getaddrinfo

        def getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else host
            if name == self.NAME:
                self.asked.append(self.address)
                return real(self.address, *rest, **named)
            return real(host, *rest, **named)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("http_client", ["httptools", "aiohttp"])
async def test_a_name_that_leads_elsewhere_later_is_not_followed(
    stub, serve, monkeypatch: pytest.MonkeyPatch, http_client: str
) -> None:
    """Who owns a name may let it lead to the metadata service once the worker is taken in."""
    dns = Rebound(monkeypatch)
    worker = await stub()
    worker.respond = lambda seen: completion()
    port = int(worker.url.rsplit(":", 1)[1])
    served = await serve(await stub(), **{"workers.http_client": http_client})
    added = await ask(served.admin, "/admin/workers", {"url": f"http://{dns.NAME}:{port}"})
    assert added.status < 300, added.body
    gateway = served.gateway
    for address in (
        *("169.254.169.254", "168.63.129.16", "192.0.0.192", "0.0.0.0"),
        *("fe80::1", "fd00:ec2::254", "::a9fe:a9fe", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe"),
    ):
        dns.address = address
        call = gateway.upstream.open(
            f"http://{dns.NAME}:{port}", CHAT, [], b"{}", timeouts=Timeouts(5.0, 5.0)
        )
        with pytest.raises(UpstreamConnectError, match="cannot be reached"):
            async with call:
                pass
        resolver = CheckedResolver(gateway.feeds.reachable)
        with pytest.raises(OSError, match="no address where a worker may be"):
            await resolver.resolve(dns.NAME, port, socket.AF_UNSPEC)
    assert worker.seen == []
    # One that the configuration itself names may be wherever it likes.
    gateway.feeds.reachable.replace([f"http://{dns.NAME}:{port}"])
    dns.address = "127.0.0.1"
    assert gateway.feeds.reachable.allows(dns.NAME, "169.254.169.254")
    assert not gateway.feeds.reachable.allows("other.test", "::ffff:169.254.169.254")
