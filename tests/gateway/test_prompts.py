"""Keys of prompts as the gateway reads them."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from gateway import prompts as module
from gateway.approved import Beginning
from gateway.config import RenderConfig
from gateway.decision import ModelProfile
from gateway.prompts import Prompt, Prompts
from shared.bundle import TokenizerBundle
from shared.bytetok import byte_bundle
from shared.openai import RouteKind, parse

BUNDLE = byte_bundle()
APPROVED = [7] * 64
PROFILE = ModelProfile("m", BUNDLE.fingerprint, (), 16, 0, shares_prefixes=True)


class Bundles:
    async def fetch(self, profile: ModelProfile) -> TokenizerBundle:
        return BUNDLE


async def read(profile: ModelProfile, prompt: object, salt: str | None = None) -> Prompt:
    """``salt``: the tenant's."""
    source = Prompts(
        RenderConfig(), b"key", Bundles(), (Beginning("approved", {"prompt": APPROVED}),)
    )
    try:
        source.want(profile)
        await source.settled(10)
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        request = replace(parse(RouteKind.COMPLETIONS, body), cache_salt=salt)
        return await source.read(request, profile)
    finally:
        await source.close()


@pytest.mark.parametrize("profile", [PROFILE, ModelProfile("m", "", (), 16, 0)])
@pytest.mark.parametrize("salt", [None, "a"])
async def test_each_prompt_of_a_list_is_read_as_if_it_came_alone(profile, salt) -> None:
    texts = ["a" * 200, "b" * 90, "c"]
    listed = await read(profile, texts, salt)
    alone = [await read(profile, text, salt) for text in texts]
    assert [one.keys for one in listed.prompts] == [one.keys for one in alone]
    assert [one.plain_keys for one in listed.prompts] == [one.plain_keys for one in alone]
    assert [one.n_tokens for one in listed.prompts] == [one.n_tokens for one in alone]
    assert listed.n_tokens == sum(one.n_tokens for one in alone)
    assert (listed.keys, listed.plain_keys) == (alone[0].keys, alone[0].plain_keys)


async def test_a_list_of_one_is_no_list() -> None:
    assert (await read(PROFILE, ["a" * 200])).prompts == ()


async def test_prompts_of_a_list_share_the_approved_beginning_that_the_worker_is_told() -> None:
    ids = [[*APPROVED, *range(40)], list(range(100)), [*APPROVED, *range(70)]]
    listed = await read(PROFILE, ids, "a")
    alone = [await read(PROFILE, one, "a") for one in ids]
    assert listed.shared == alone[0].shared != ""
    assert [one.keys for one in listed.prompts] == [one.keys for one in alone]
    assert listed.prompts[0].keys[:4] == listed.prompts[2].keys[:4]


async def test_of_very_long_lists_the_rest_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_PROMPTS", 3)
    ids = [list(range(size)) for size in (20, 30, 40, 50, 60)]
    listed = await read(PROFILE, ids)
    assert [one.n_tokens for one in listed.prompts] == [20, 30, 150]
    assert listed.n_tokens == 200
