"""A worker that loads and unloads adapters while it serves; the model without torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from lorakit import write_fake

from tests.workerrig import CHAT, COMPLETIONS, Client, completion, error_of, until

LONG = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
LOAD, UNLOAD, ADAPTERS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/admin/adapters"


@pytest.fixture
async def client(fake_worker: Any) -> AsyncIterator[Client]:
    async with Client(fake_worker.url) as made:
        yield made


@pytest.fixture
async def admin(fake_worker: Any) -> AsyncIterator[Client]:
    """The admin listener; what a test loaded is gone afterwards."""
    async with Client(fake_worker.admin_url) as made:
        yield made
        for adapter in (await made.http.get(ADAPTERS)).json()["adapters"]:
            await made.post(UNLOAD, {"lora_name": adapter["name"]})


async def load(admin: Client, name: str, folder: Path, **more: Any) -> dict[str, Any]:
    return await admin.ask(LOAD, {"lora_name": name, "lora_path": str(folder), **more})


async def answer(client: Client, model: str, prompt: str = LONG, **more: Any) -> tuple[str, int]:
    """Text and cached tokens."""
    body = completion(prompt, model=model, max_tokens=24, ignore_eos=True, **more)
    got = await client.ask(COMPLETIONS, body)
    assert got["model"] == model
    return got["choices"][0]["text"], got["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_each_adapter_answers_in_its_own_way_and_cache(
    client: Client, admin: Client, tmp_path: Path
) -> None:
    await load(admin, "a", write_fake(tmp_path / "a", "1"))
    await load(admin, "b", write_fake(tmp_path / "b", "2"))
    prompt = f"own way {LONG}"
    cold = {name: await answer(client, name, prompt) for name in ("fake", "a", "b")}
    assert len({text for text, _ in cold.values()}) == 3
    assert {cached for _, cached in cold.values()} == {0}
    for name, (text, _) in cold.items():
        warm, cached = await answer(client, name, prompt)
        assert (warm, cached) == (text, len(prompt) // 16 * 16)


async def test_a_reload_with_other_weights_finds_nothing_cached(
    client: Client, admin: Client, tmp_path: Path
) -> None:
    prompt = f"reload {LONG}"
    folder = write_fake(tmp_path / "x", "1")
    first = await load(admin, "x", folder)
    old = await answer(client, "x", prompt)
    assert (await answer(client, "x", prompt))[1] > 0
    write_fake(folder, "2")
    second = await load(admin, "x", folder, load_inplace=True)
    assert second["revision"] != first["revision"]
    new = await answer(client, "x", prompt)
    assert (new[0] != old[0], new[1]) == (True, 0)
    # the first weights again, also after an unload: what was computed with them is right again
    write_fake(folder, "1")
    await admin.ask(UNLOAD, {"lora_name": "x"})
    await load(admin, "x", folder)
    text, cached = await answer(client, "x", prompt)
    assert (text, cached > 0) == (old[0], True)


async def test_a_config_alone_makes_another_revision(admin: Client, tmp_path: Path) -> None:
    first = await load(admin, "x", write_fake(tmp_path / "x", lora_alpha=16))
    second = await load(admin, "y", write_fake(tmp_path / "y", lora_alpha=32))
    assert first["revision"] != second["revision"]


async def test_an_adapter_named_as_a_salt_shares_nothing_with_it(
    client: Client, admin: Client, tmp_path: Path
) -> None:
    prompt = f"salted {LONG}"
    loaded = await load(admin, "pepper", write_fake(tmp_path / "x", "1"))
    scope = f"pepper@{loaded['revision']}"
    seen = [await answer(client, "fake", prompt, cache_salt=salt) for salt in ("pepper", scope)]
    seen.append(await answer(client, "pepper", prompt))
    seen.append(await answer(client, "pepper", prompt, cache_salt="pepper"))
    assert [cached for _, cached in seen] == [0, 0, 0, 0]


async def test_model_lists_have_the_form_of_vllm(
    client: Client, admin: Client, tmp_path: Path
) -> None:
    folder = write_fake(tmp_path / "x")
    before = (await client.http.get("/headwater/info")).json()
    await load(admin, "x", folder)
    base, card = (await client.http.get("/v1/models")).json()["data"]
    assert (base["id"], base["parent"]) == ("fake", None)
    assert (card["id"], card["parent"], card["root"]) == ("x", "fake", str(folder))
    assert card["object"] == "model"
    assert (await client.http.get("/v1/models/x")).json() == card
    info = (await client.http.get("/headwater/info")).json()
    assert [one["name"] for one in info["adapters"]] == ["x"]
    assert info["revision"] > before["revision"]
    assert (await client.load())["info_revision"] == info["revision"]
    tokens = await client.ask("/tokenize", {"model": "x", "prompt": "abc"})
    assert tokens["count"] == 3


async def test_unloading_refuses_new_requests_at_once(
    client: Client, admin: Client, tmp_path: Path
) -> None:
    await load(admin, "x", write_fake(tmp_path / "x"))
    await admin.ask(UNLOAD, {"lora_name": "x"})
    for path, body in (
        (COMPLETIONS, completion("hi", model="x")),
        (CHAT, {"model": "x", "messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"model": "x", "prompt": "hi"}),
    ):
        refused = await client.post(path, body)
        assert refused.status_code == 404
        assert error_of(refused)["code"] == "model_not_found"
    assert (await client.http.get("/v1/models/x")).status_code == 404
    again = await admin.post(UNLOAD, {"lora_name": "x"})
    assert again.status_code == 404
    assert "'x' is not loaded" in error_of(again)["message"]


async def test_running_requests_end_with_the_weights_they_began_with(
    worker_process: Callable[..., Any], tmp_path: Path
) -> None:
    worker = worker_process(env={"HEADWATER_FAKE__DECODE_MS_PER_STEP": "10"})
    async with Client(worker.url) as client, Client(worker.admin_url) as admin:
        folder = write_fake(tmp_path / "x", "1")
        await load(admin, "x", folder)
        body = completion("a long tale", model="x", max_tokens=100, ignore_eos=True)
        alone = (await client.ask(COMPLETIONS, body))["choices"][0]["text"]
        running = asyncio.create_task(client.ask(COMPLETIONS, body))

        async def runs() -> bool:
            return (await client.load())["running"] == 1

        await until(runs)
        write_fake(folder, "2")
        await load(admin, "x", folder, load_inplace=True)
        listed = (await admin.http.get(ADAPTERS)).json()["adapters"]
        assert [(one["state"], one["requests"]) for one in listed] == [
            ("served", 0),
            ("leaving", 1),
        ]
        assert (await client.ask(COMPLETIONS, body))["choices"][0]["text"] != alone
        assert (await running)["choices"][0]["text"] == alone

        # a client that leaves ends its use, too
        stream = client.http.stream("POST", COMPLETIONS, json={**body, "stream": True})
        async with stream as response:
            await anext(response.aiter_bytes())
            await admin.ask(UNLOAD, {"lora_name": "x"})

        async def gone() -> bool:
            return (await admin.http.get(ADAPTERS)).json()["adapters"] == []

        await until(gone)
        assert (await client.ask(COMPLETIONS, completion("hi")))["model"] == "fake"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 1, "lora_path": "p"}, "lora_name"),
        ({"lora_name": "", "lora_path": "p"}, "lora_name"),
        ({"lora_name": "fake", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": " a", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "a" * 257, "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "twice", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/dev"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "nul\x00byte"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "GOOD", "load_inplace": "yes"}, "load_inplace"),
    ],
)
async def test_what_cannot_be_loaded_is_one_clear_error(
    client: Client, admin: Client, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    good = write_fake(tmp_path / "good")
    await load(admin, "twice", good)
    body = {k: str(good) if v == "GOOD" else v for k, v in fields.items()}
    refused = await admin.post(LOAD, body)
    assert refused.status_code in (400, 404)
    error = error_of(refused)
    assert error["param"] == param
    assert "\n" not in error["message"]
    assert (await client.ask(COMPLETIONS, completion("hi", model="twice")))["model"] == "twice"


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "cannot be read"),
        (
            lambda folder: (folder / "adapter_config.json").write_bytes(b"\xff\xfe"),
            "cannot be read",
        ),
        (lambda folder: (folder / "adapter_config.json").unlink(), "is missing"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is missing"),
        (lambda folder: write_fake(folder, use_dora=True), "use_dora"),
        (lambda folder: write_fake(folder, r=512), "max_lora_rank"),
    ],
)
async def test_a_broken_folder_leaves_the_worker_serving(
    client: Client, admin: Client, tmp_path: Path, damage: Callable[[Path], Any], word: str
) -> None:
    folder = write_fake(tmp_path / "x")
    damage(folder)
    refused = await admin.post(LOAD, {"lora_name": "x", "lora_path": str(folder)})
    assert refused.status_code == 400
    assert word in error_of(refused)["message"]
    assert (await admin.http.get(ADAPTERS)).json()["adapters"] == []
    await client.ask(COMPLETIONS, completion("hi"))
    await load(admin, "x", write_fake(folder))


async def test_no_more_than_max_loras(admin: Client, tmp_path: Path) -> None:
    folder = write_fake(tmp_path / "x")
    for number in range(8):
        await load(admin, f"x{number}", folder)
    refused = await admin.post(LOAD, {"lora_name": "x8", "lora_path": str(folder)})
    assert "max_loras" in error_of(refused)["message"]
    await load(admin, "x3", write_fake(folder, "2"), load_inplace=True)


async def test_the_public_listener_knows_none_of_it(client: Client, tmp_path: Path) -> None:
    body = {"lora_name": "x", "lora_path": str(write_fake(tmp_path / "x"))}
    for path in (LOAD, UNLOAD):
        assert (await client.post(path, body)).status_code == 404
    assert (await client.http.get(ADAPTERS)).status_code == 404


async def test_the_admin_listener_wants_its_token(
    worker_process: Callable[..., Any], tmp_path: Path
) -> None:
    worker = worker_process(env={"HEADWATER_SERVE__ADMIN_TOKEN": "secret"})
    body = {"lora_name": "x", "lora_path": str(write_fake(tmp_path / "x"))}
    async with Client(worker.admin_url) as admin:
        assert (await admin.post(LOAD, body)).status_code == 401
        assert (await admin.post(LOAD, body, Authorization="Bearer secret")).status_code == 200


async def test_adapters_named_at_the_start(
    worker_process: Callable[..., Any], tmp_path: Path
) -> None:
    a, b = write_fake(tmp_path / "a", "1"), write_fake(tmp_path / "b", "2")
    worker = worker_process("--lora", f"a={a}", "--lora", f"b={b}", "--max-loras", "2")
    async with Client(worker.url) as client:
        listed = (await client.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["fake", "a", "b"]
        assert len({(await answer(client, name))[0] for name in ("fake", "a", "b")}) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora", "x"], "must be NAME=DIR"),
        (["--lora", "fake={dir}"], "name of the model itself"),
        (["--lora", "x={dir}", "--lora", "x={dir}"], "named twice"),
        (["--lora", "x={dir}/nowhere"], "no such folder"),
        (["--lora", "x={dir}", "--max-loras", "0"], "max_loras is 0"),
    ],
)
async def test_wrong_settings_end_with_one_line(
    worker_process: Callable[..., Any], tmp_path: Path, flags: list[str], words: str
) -> None:
    folder = write_fake(tmp_path / "x")
    made = worker_process(*(flag.format(dir=folder) for flag in flags), wait=False)
    assert made.wait() == 2
    last = made.stderr.read_text().strip().splitlines()[-1]
    assert "model.lora_modules" in last
    assert words in last


async def test_metrics_tell_how_many_there_are(
    client: Client, admin: Client, tmp_path: Path
) -> None:
    await load(admin, "x", write_fake(tmp_path / "x"))
    text = (await client.http.get("/metrics")).text
    assert 'headwater_engine_adapters{state="served"} 1.0' in text
    assert json.dumps("x") not in text
