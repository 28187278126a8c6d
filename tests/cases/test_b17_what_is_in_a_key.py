"""B17: model, adapter and salt are part of what is compared, each by itself."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from cachestub import Engine, words
from caserig import COMPLETIONS, body_for
from rig import CHAT, ask

TEXT = words(500, 1)
KNOWN = 480
NAME = "team-a"
SCOPES: dict[str, dict[str, Any]] = {
    "model m1": {"model": "m1"},
    "model m2": {"model": "m2"},
    "adapter": {"model": NAME},
    "salt t1": {"model": "m1", "cache_salt": "t1"},
    "salt t2": {"model": "m1", "cache_salt": "t2"},
    "salt like the adapter": {"model": "m1", "cache_salt": NAME},
    "salt like a model": {"model": "m1", "cache_salt": "m2"},
    "adapter with a salt": {"model": NAME, "cache_salt": "t1"},
    "salt t1 of m2": {"model": "m2", "cache_salt": "t1"},
    "salt of blanks": {"model": "m1", "cache_salt": " "},
}


@pytest.fixture
async def served(stub: Any, serve: Any) -> Any:
    """S1 and S2 with both models and an adapter of m1."""
    workers = [await stub(("m1", "m2", NAME)) for _ in range(2)]
    for worker in workers:
        worker.parents = {NAME: "m1"}
        Engine(worker, service_s=0.0)
    return await serve(*workers)


async def send(served: Any, path: str, scope: dict[str, Any], text: str = TEXT) -> int:
    """One answered request; the predicted match."""
    reply = await ask(served.url, path, {**body_for(path, text), **scope})
    assert reply.status == 200, reply.body
    return int(reply.header("x-headwater-matched-tokens") or 0)


async def known(served: Any, path: str, scope: dict[str, Any], text: str = TEXT) -> int:
    """The best match that any worker is believed to have."""
    answer = await ask(served.admin, "/admin/explain", {**body_for(path, text), **scope})
    assert answer.status == 200, answer.body
    return max(each["matched_tokens"] for each in answer.json["workers"])


@pytest.mark.parametrize("warm", SCOPES)
async def test_one_scope_warms_no_other(served: Any, warm: str) -> None:
    assert await send(served, CHAT, SCOPES[warm]) == 0
    for name, scope in SCOPES.items():
        expected = await known(served, CHAT, scope)
        assert (expected >= KNOWN) == (name == warm), (warm, name, expected)
        assert expected in (0, expected if name == warm else 0)
    assert await send(served, CHAT, SCOPES[warm]) >= KNOWN
    different = words(500, 2)
    assert await known(served, CHAT, SCOPES[warm], different) == 0


async def test_all_scopes_side_by_side(served: Any) -> None:
    """Warmed one after the other, on one path; each is then known for itself."""
    for name, scope in SCOPES.items():
        assert await send(served, COMPLETIONS, scope) == 0, name
    for name, scope in SCOPES.items():
        assert await send(served, COMPLETIONS, scope) >= KNOWN, name


@pytest.mark.parametrize(
    ("one", "other"), list(permutations(["", "a", "aa", "a\x00", "\u00e4"], 2))
)
async def test_salts_that_look_alike(served: Any, one: str, other: str) -> None:
    def salted(salt: str) -> dict[str, Any]:
        return {"model": "m1", **({"cache_salt": salt} if salt else {})}

    assert await send(served, CHAT, salted(one)) == 0
    assert await known(served, CHAT, salted(other)) == 0
    assert await known(served, CHAT, salted(one)) >= KNOWN


async def test_an_empty_or_null_salt_is_none(served: Any) -> None:
    assert await send(served, CHAT, {"model": "m1"}) == 0
    assert await known(served, CHAT, {"model": "m1", "cache_salt": None}) >= KNOWN


async def test_names_of_one_model_share_its_keys(stub: Any, serve: Any) -> None:
    """A server that says that its names have one root has aliases, not models."""
    worker = await stub(("m1", "m2"))
    worker.root = "/weights/m"
    Engine(worker, service_s=0.0)
    served = await serve(worker)
    assert await send(served, CHAT, {"model": "m1"}) == 0
    assert await send(served, CHAT, {"model": "m2"}) >= KNOWN


async def test_the_path_is_no_part_of_a_key_but_the_template_is(served: Any) -> None:
    """A completion of the rendered text is the same prompt; of the bare text it is not."""
    assert await send(served, CHAT, {"model": "m1"}) == 0
    assert await known(served, COMPLETIONS, {"model": "m1"}) == 0
    assert await known(served, COMPLETIONS, {"model": "m1"}, f"user\n{TEXT}\n") >= KNOWN
