"""A19: the model list is what can be served now, and unknown models are refused by name.

"One health period" is 0.1 s here; vanishing and coming back are given 1 s.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import openai
import pytest
from caserig import COMPLETIONS, body_for, check_error, counts, sdk, settles
from rig import CHAT, Stub, ask, chat, completion, eventually

UNKNOWN: list[dict[str, Any]] = [
    {"model": name} for name in ("m9", "M2", "m2 ", "m2/", "m", "m" * 5000, "m2\n", "mé")
]
NO_NAME: list[dict[str, Any]] = [{"model": None}, {"model": ""}, {}]
NO_STRING: list[dict[str, Any]] = [{"model": value} for value in (5, ["m2"], {"id": "m2"}, True)]
ROUTES = (CHAT, COMPLETIONS, "/v1/embeddings", "/v1/responses", "/v1/rerank")


async def listed(url: str) -> list[str]:
    """Ids of the list, whose shape is checked."""
    reply = await ask(url, "/v1/models")
    assert reply.status == 200
    assert reply.json["object"] == "list"
    for card in reply.json["data"]:
        assert card["object"] == "model"
        assert type(card["created"]) is int
        assert isinstance(card["owned_by"], str)
        assert isinstance(card["id"], str)
    return [card["id"] for card in reply.json["data"]]


@pytest.fixture
async def fleet(stub, serve):
    """S1 with m1 and m2, S2 with m2 and m3, S3 (down) with m4, behind a gateway."""
    one, two, three = await stub(("m1", "m2")), await stub(("m2", "m3")), await stub(("m4",))
    await three.stop()
    served = await serve(one, two, three, wait=False)
    await eventually(lambda: served.gateway.router.models() == ("m1", "m2", "m3"))
    for worker in (one, two, three):
        worker.plays(completion())
    return served


def text_for(path: str, model: dict[str, Any]) -> dict[str, Any]:
    """A body without a model but the given one."""
    body = body_for(path)
    del body["model"]
    return {**body, **model}


async def test_the_union_of_live_workers(fleet) -> None:
    assert sorted(await listed(fleet.url)) == ["m1", "m2", "m3"]
    one = await ask(fleet.url, "/v1/models/m2")
    assert (one.status, one.json["id"], one.json["object"]) == (200, "m2", "model")
    for name in ("m9", "m4", "M2", "m2%20", "m"):
        error = check_error(await ask(fleet.url, f"/v1/models/{name}"), 404)
        assert error["code"] == "model_not_found"
    async with sdk(fleet.url) as client:
        assert sorted([card.id async for card in client.models.list()]) == ["m1", "m2", "m3"]
        assert (await client.models.retrieve("m3")).id == "m3"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("m9")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_listed_model_answers(fleet, path) -> None:
    for name in await listed(fleet.url):
        reply = await ask(fleet.url, path, {**body_for(path, max_tokens=1), "model": name})
        assert reply.status == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_a_model_goes_to_who_has_it(fleet, path) -> None:
    one, two, _ = fleet.stubs
    for _ in range(6):
        assert (await ask(fleet.url, path, {**body_for(path), "model": "m3"})).status == 200
    assert counts([one, two]) == [0, 6]
    for _ in range(6):
        assert (await ask(fleet.url, path, {**body_for(path), "model": "m1"})).status == 200
    assert counts([one, two]) == [6, 6]


@pytest.mark.parametrize("path", ROUTES)
async def test_unknown_and_missing_models_reach_no_worker(fleet, path) -> None:
    for model in [*UNKNOWN, *NO_NAME, *NO_STRING, {"model": "m4"}]:
        for streamed in (False, True):
            body = {**text_for(path, model), "stream": streamed}
            error = check_error(await ask(fleet.url, path, body), 400, 404)
            if model in UNKNOWN or model == {"model": "m4"}:
                assert "model_not_found" in str(error["code"])
            assert len(error["message"]) < 1000
    assert counts(fleet.stubs) == [0, 0, 0]


async def test_the_sdk_knows_an_unknown_model(fleet) -> None:
    async with sdk(fleet.url) as client:
        with pytest.raises(openai.NotFoundError) as raised:
            await client.chat.completions.create(**{**chat(), "model": "m9"})
    assert raised.value.code == "model_not_found"


async def names_are(url: str, *names: str, within_s: float = 1.0) -> None:
    """Wait until exactly these are listed."""

    async def so() -> bool:
        return sorted(await listed(url)) == sorted(names)

    await settles(so, within_s)


async def test_what_leaves_vanishes_and_what_comes_appears(fleet) -> None:
    _, two, three = fleet.stubs
    await two.stop()
    await names_are(fleet.url, "m1", "m2")
    check_error(await ask(fleet.url, CHAT, {**chat(), "model": "m3"}), 404, 503)
    assert (await ask(fleet.url, "/v1/models/m3")).status == 404
    await three.listen()
    await names_are(fleet.url, "m1", "m2", "m4", within_s=3.0)
    assert (await ask(fleet.url, CHAT, {**chat(), "model": "m4"})).status == 200
    await two.listen()
    await names_are(fleet.url, "m1", "m2", "m3", "m4", within_s=3.0)
    assert (await ask(fleet.url, CHAT, {**chat(), "model": "m3"})).status == 200


async def test_ill_workers_have_no_models(fleet) -> None:
    one, two, _ = fleet.stubs
    two.healthy = False
    await names_are(fleet.url, "m1", "m2")
    one.healthy = False
    await names_are(fleet.url)
    for name in ("m1", "m2", "m3", "m9"):
        check_error(await ask(fleet.url, CHAT, {**chat(), "model": name}), 404, 503)
    one.healthy = two.healthy = True
    await names_are(fleet.url, "m1", "m2", "m3", within_s=3.0)
    assert counts(fleet.stubs) == [0, 0, 0]


async def test_removed_by_the_operator(fleet) -> None:
    _, two, _ = fleet.stubs
    await ask(fleet.admin, f"/admin/workers/{two.id}", method="DELETE")
    assert sorted(await listed(fleet.url)) == ["m1", "m2"]
    check_error(await ask(fleet.url, CHAT, {**chat(), "model": "m3"}), 404)
    added = await ask(fleet.admin, "/admin/workers", {"url": two.url})
    assert added.status == 200, added.body
    await names_are(fleet.url, "m1", "m2", "m3")


async def test_a_worker_that_changes_its_models(fleet) -> None:
    """An engine that loads an adapter, or is started again with another model."""
    one, _, _ = fleet.stubs
    one.models = ("m5",)
    await names_are(fleet.url, "m5", "m2", "m3")
    assert (await ask(fleet.url, CHAT, {**chat(), "model": "m5"})).status == 200
    check_error(await ask(fleet.url, CHAT, {**chat(), "model": "m1"}), 404)
    assert len(one.seen) == 1


ODD_NAMES = ("org/name", "org/name:tag", "a b", "ü-model", "x" * 200, "m%41", "m?x", "m#y")


async def test_names_with_odd_characters(stub, serve) -> None:
    worker: Stub = await stub(ODD_NAMES)
    worker.plays(completion())
    served = await serve(worker)
    assert sorted(await listed(served.url)) == sorted(ODD_NAMES)
    for name in ODD_NAMES:
        paths = {quote(name, safe=""), quote(name, safe="/:")}
        for path in paths:
            reply = await ask(served.url, f"/v1/models/{path}")
            assert (reply.status, reply.json.get("id")) == (200, name)
        assert (await ask(served.url, CHAT, {**chat(), "model": name})).status == 200
    async with sdk(served.url) as client:
        assert (await client.models.retrieve("org/name")).id == "org/name"


async def test_no_workers_at_all(serve) -> None:
    served = await serve(wait=False)
    assert await listed(served.url) == []
    check_error(await ask(served.url, "/v1/models/m"), 404)
    for model in [*NO_NAME, *NO_STRING]:
        check_error(await ask(served.url, CHAT, text_for(CHAT, model)), 400)


@pytest.mark.parametrize("dead", [0, 1])
async def test_before_any_worker_has_answered_no_model_is_unknown(stub, serve, dead) -> None:
    """Which models there are nobody knows yet: clients are to come again, not to give up."""
    workers = [await stub() for _ in range(dead)]
    for worker in workers:
        await worker.stop()
    served = await serve(*workers, wait=False)
    for path in (CHAT, COMPLETIONS, "/v1/embeddings", "/v1/responses", "/tokenize"):
        reply = await ask(served.url, path, text_for(path, {"model": "m"}))
        check_error(reply, 503)
        assert int(reply.header("retry-after")) >= 1
