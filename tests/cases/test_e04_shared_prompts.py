"""E04: an approved system prompt is shared by all tenants, to its last full block, not further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from caserig import GatewayLauncher, GatewayProcess, wait_until
from conftest import WorkerProcess
from rig import CHAT, Reply, ask

from shared.sharedprefix import HEADER

SYSTEM = "You answer for the shop, in two sentences, and never speak of prices. " * 5
SHARED = (len(f"system\n{SYSTEM}\nuser\n") + 3) // 16 * 16
"""One token per byte and marker of the template."""
KEYS = ("sk-one", "sk-two", *(f"sk-{side}{number}" for side in "ab" for number in range(3)))
SECRET = "the launch codes are in the blue folder " * 10


async def send(gateway: GatewayProcess, key: str, text: str, *headers: tuple[str, str],
               system: str = SYSTEM, **more: Any) -> Reply:  # fmt: skip
    reply = await ask(gateway.url, CHAT, body(text, system, **more),
                      ("Authorization", f"Bearer {key}"), *headers)  # fmt: skip
    assert reply.status == 200, reply.body
    return reply


def body(text: str, system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"model": "fake", "messages": messages, "max_tokens": 2, **more}


def cached(reply: Reply) -> int:
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def matched(reply: Reply) -> int:
    return int(reply.header("x-headwater-matched-tokens") or 0)


async def test_tenants_share_what_is_approved_and_nothing_behind(
    fake_worker: WorkerProcess, gateway_process: GatewayLauncher, tmp_path: Path
) -> None:
    file = tmp_path / "shop.txt"
    file.write_text(SYSTEM)
    gateway = gateway_process(
        fake_worker.url,
        env={
            "HEADWATER_LISTEN__API_KEYS": ",".join(KEYS),
            "HEADWATER_TENANCY__SHARED_PROMPTS": str(file),
        },
    )
    gateway.await_exact(1)
    wait_until(lambda: not gateway.public("/ready")["notes"])
    assert cached(await send(gateway, "sk-one", SECRET)) == 0
    own = await send(gateway, "sk-one", SECRET)
    assert cached(own) >= SHARED + 320
    # What is known of it without a salt is the approved part, and only that.
    wait_until(lambda: gateway.explain(body(SECRET))[fake_worker_id(gateway)] == SHARED)

    other = await send(gateway, "sk-two", SECRET)
    assert (cached(other), matched(other)) == (SHARED, SHARED)
    # Nothing that it sends moves the end.
    long = f"{(SHARED + 320)}:{'0' * 32}"
    for more, headers in (({}, ((HEADER, long),)), ({"tools": []}, ()), ({"user": "key1"}, ())):
        guess = await send(gateway, "sk-two", SECRET + " ", *headers, **more)
        assert cached(guess) >= SHARED + 320  # of its own, by now
    fresh = "another guess at what the first one sent " * 10
    assert cached(await send(gateway, "sk-one", fresh)) == SHARED
    assert cached(await send(gateway, "sk-two", fresh, (HEADER, long))) == SHARED
    # A salt of its own is a wish to share nothing, and another system prompt is not approved.
    assert cached(await send(gateway, "sk-two", fresh, cache_salt="mine")) == 0
    for number, system in enumerate((SYSTEM + "PS: 1234", SYSTEM[:-1], "x" + SYSTEM)):
        seen = [
            cached(await send(gateway, f"sk-{side}{number}", fresh, system=system))
            for side in "aab"
        ]
        assert (seen[0], seen[1] > SHARED, seen[2]) == (0, True, 0)


async def test_a_worker_believes_only_what_was_approved_under_the_secret(
    fake_worker: WorkerProcess,
) -> None:
    text = "what somebody who reaches the worker sends " * 10
    for code in ("0" * 32, "f" * 32, "x", ""):
        for tokens in (16, 160, 10**9):
            header = (HEADER, f"{tokens}:{code}")
            seen = []
            for salt in (f"a{code}{tokens}", f"b{code}{tokens}"):
                reply = await ask(fake_worker.url, CHAT, body(text, cache_salt=salt), header)
                assert reply.status == 200
                seen.append(cached(reply))
            assert seen == [0, 0]


def fake_worker_id(gateway: GatewayProcess) -> str:
    return str(gateway.workers()[0]["id"])
