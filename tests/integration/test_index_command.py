"""``headwater index`` against running gateways: stubs that report, and a worker with events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledgerkit import headwater
from redisload import await_in_step
from rig import CHAT, ask, chat, completion, eventually, usage

LONG = "a system prompt that goes on and on for a good while " * 12


@pytest.fixture
def index(capsys: pytest.CaptureFixture[str]) -> Any:
    """``await index(admin, "stats", ...)``: exit code, what it printed (without the lines that
    the gateway logs), and its errors."""

    async def run(admin: str, *arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(headwater, "index", *arguments, "--url", admin)
        printed = capsys.readouterr()
        # What the gateway in this process logs goes there, too.
        lines = [line for line in printed.out.splitlines() if not line.startswith("20")]
        errors = [line for line in printed.err.splitlines() if line.startswith("headwater")]
        return code, "\n".join(lines), "\n".join(errors)

    return run


def request(tmp_path: Path, text: str = LONG) -> str:
    """A request's body in a file."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(chat(text)))
    return str(path)


async def test_who_holds_a_prompt_and_what_there_is(stub, serve, index, tmp_path) -> None:
    workers = [await stub(), await stub()]
    served = await serve(*workers)
    for worker in workers:
        worker.plays(completion(usage=usage(160, 3, 0)))
    file = request(tmp_path)
    code, text, _ = await index(served.admin, "who", file)
    assert (code, "Nobody holds any of it, and it was never seen" in text) == (0, True)
    assert (await ask(served.url, CHAT, chat(LONG))).status == 200
    code, answer, _ = await index(served.admin, "who", file, "--format", "json")
    told = json.loads(answer)
    holder = next(one for one in workers if one.seen)
    assert (
        told["holders"][0] | {"id": holder.id, "tokens": 160, "trust": "learned"}
        == (told["holders"][0])
    )
    assert told["holders"][1]["tokens"] == 0
    assert told["matchable_tokens"] >= 160
    code, text, _ = await index(served.admin, "who", file)
    assert f"{holder.id} holds most: 160 tokens" in text
    code, answer, _ = await index(served.admin, "stats", "--format", "json")
    stats = json.loads(answer)
    contents = {one["id"]: one for one in stats["workers"]}
    assert (code, stats["entries"], stats["seen_blocks"]) == (0, 10, 10)
    assert (contents[holder.id]["blocks"], contents[holder.id]["tokens"]) == (10, 160)
    assert contents[holder.id]["learned_tokens"] > 0
    code, text, _ = await index(served.admin, "stats")
    assert text.startswith("10 entries of at most 10,000,000")
    assert "no event feed" in text


async def test_flush_of_one_and_of_all(stub, serve, index, tmp_path) -> None:
    workers = [await stub(), await stub()]
    served = await serve(*workers)
    for worker in workers:
        worker.plays(completion(usage=usage(160, 3, 0)))
    for n in range(6):
        await ask(served.url, CHAT, chat(f"{n} {LONG}"))
    held = [len(worker.seen) * 10 for worker in workers]
    one, other = workers
    code, text, _ = await index(served.admin, "flush", one.id)
    assert (code, text.splitlines()[-1]) == (0, f"{one.id}: {held[0]} entries forgotten")
    code, answer, _ = await index(served.admin, "flush", "--all", "--format", "json")
    told = json.loads(answer)
    assert (code, told) == (0, {"flushed": {one.id: 0, other.id: held[1]}})
    assert served.gateway.router.index_stats(0.0).entries == 0
    await ask(served.url, CHAT, chat(LONG))
    assert served.gateway.router.index_stats(0.0).entries == 10, "it is learned again"


async def test_a_worker_with_events_tells_all_of_it_again(
    fake_worker, serve, index, tmp_path
) -> None:
    served = await serve(**{"workers.urls": fake_worker.url})

    def status() -> Any:
        found = served.gateway.router.workers(0.0)
        return found[0] if found else None

    await eventually(lambda: status() is not None and status().trust == "exact", 20.0)
    model = status().models[0]
    body = chat(LONG) | {"model": model, "max_tokens": 2}
    assert (await ask(served.url, CHAT, body)).status == 200
    await await_in_step(served.gateway._index, fake_worker)
    assert status().index_blocks > 5
    before = status().index_blocks
    assert (await index(served.admin, "flush", status().id))[0] == 0
    assert status().trust == "learned" or status().index_blocks == before
    await eventually(lambda: status().trust == "exact", 20.0)
    assert status().index_blocks == before


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("flush",), 2, "give either a worker's id or --all"),
        (("flush", "w", "--all"), 2, "give either a worker's id or --all"),
        (("flush", "nobody"), 1, "There is no worker 'nobody'."),
        (("stats", "--format", "xml"), 2, "is none of text, json"),
        (("who", "/nonexistent.json"), 2, "cannot be read"),
    ],
)
async def test_what_cannot_be_done_is_one_line(serve, index, arguments, code, says) -> None:
    served = await serve(wait=False)
    got, _, error = await index(served.admin, *arguments)
    assert got == code
    assert says in error
    assert len(error.splitlines()) == 1


async def test_a_model_that_nobody_has_and_a_gateway_that_is_not_there(
    serve, index, tmp_path
) -> None:
    served = await serve(wait=False)
    got, _, error = await index(served.admin, "who", request(tmp_path))
    assert (got, "does not exist" in error) == (1, True)
    got, _, error = await index("http://127.0.0.1:9", "stats")
    assert (got, "no gateway answers at" in error) == (1, True)
    got, _, error = await index(served.url, "stats")
    assert (got, "headwater index: the gateway answered 404" in error) == (1, True)


@pytest.mark.parametrize("body", [{}, {"worker": 3}, {"worker": "w", "all": True}, {"all": 1}])
async def test_a_flush_says_whom_it_means(serve, body) -> None:
    served = await serve(wait=False)
    reply = await ask(served.admin, "/admin/index/flush", body)
    assert (reply.status, reply.json["error"]["param"]) == (400, "worker")


TENANTS = ["key1", "key2", "key3"]


@pytest.mark.parametrize("owner", [0, 1])
async def test_who_and_explain_ask_for_one_tenants_prompts(
    stub, serve, index, tmp_path, owner
) -> None:
    """What a tenant's prompt left is found for that tenant only, and its own salt narrows it."""
    worker = await stub()
    settings = {"listen.api_keys": "sk-a,sk-b,sk-c", "tenancy.unisolated": "allow"}
    served = await serve(worker, **settings)
    worker.plays(completion(usage=usage(160, 3, 0)))
    key = ("x-api-key", f"sk-{'abc'[owner]}")
    assert (await ask(served.url, CHAT, chat(LONG), key)).status == 200
    file = request(tmp_path)
    for name in ["", *TENANTS]:
        found = 160 if name == TENANTS[owner] else 0
        body = chat(LONG) | ({"tenant": name} if name else {})
        told = json.loads((await ask(served.admin, "/admin/explain", body)).body)
        assert [one["matched_tokens"] for one in told["workers"]] == [found], name
        assert told["request"]["tenant"] == name
        assert told["request"]["tenant_missing"] == (not name)
        options = ("--tenant", name) if name else ()
        code, answer, _ = await index(served.admin, "who", file, "--format", "json", *options)
        assert (code, json.loads(answer)["holders"][0]["tokens"]) == (0, found)
        _, text, _ = await index(served.admin, "who", file, *options)
        assert ("Tenants are kept apart" in text) == (not name)
    narrow = chat(LONG) | {"tenant": TENANTS[owner], "cache_salt": "mine"}
    told = json.loads((await ask(served.admin, "/admin/explain", narrow)).body)
    assert told["workers"][0]["matched_tokens"] == 0
    for wrong in ("nobody", 7, None, ["key1"]):
        reply = await ask(served.admin, "/admin/explain", chat(LONG) | {"tenant": wrong})
        assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "tenant")


async def test_explain_knows_the_tenants_of_a_changed_configuration(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    body = chat(LONG) | {"tenant": "key1"}
    assert (await ask(served.admin, "/admin/explain", body)).status == 400
    listen = msgspec.structs.replace(served.gateway._config.listen, api_keys=("sk-a",))
    tenancy = msgspec.structs.replace(served.gateway._config.tenancy, unisolated="allow")
    config = msgspec.structs.replace(served.gateway._config, listen=listen, tenancy=tenancy)
    assert not (await served.gateway.reload(config)).pending
    assert (await ask(served.admin, "/admin/explain", body)).status == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("allowed", [True, False])
async def test_explain_with_another_policy(stub, serve, route: str, allowed: bool) -> None:
    """As the request itself would be served: one that does not exist is refused by its name."""
    served = await serve(await stub(), **{"routing.allow_policy_header": str(allowed).lower()})
    body = {**chat(), "prompt": "x", "input": "x", "route": route}
    for policy, status in (("round_robin", 200), ("nope", 400 if allowed else 200), ("", 200)):
        reply = await ask(served.admin, "/admin/explain", body, ("x-headwater-policy", policy))
        assert reply.status == status, reply.body
        if status == 400:
            assert reply.json["error"]["param"] == "x-headwater-policy"
        else:
            asked_for = policy if allowed and policy else "cost"
            assert reply.json["policy"] == asked_for
