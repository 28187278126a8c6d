"""E01: nobody without the admin token changes the fleet, and nobody points it at odd addresses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rig import CHAT, Seen, ask, chat, plain

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
