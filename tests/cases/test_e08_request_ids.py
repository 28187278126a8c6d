"""E08: ids that clients choose. They are labels to be echoed, and never keys of anything."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from caserig import COMPLETIONS, body_for, settles
from conftest import WorkerLauncher
from rig import CHAT

KEYS = ("key-one", "key-two")
SLOW = {"HEADWATER_FAKE__DECODE_MS_PER_STEP": "5"}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A worker that takes two keys and needs 5 ms for a token."""
    launcher = WorkerLauncher(tmp_path_factory.mktemp("ids"))
    yield launcher(env={"HEADWATER_SERVE__API_KEYS": json.dumps(KEYS), **SLOW})
    launcher.end()


@pytest.fixture(scope="module")
def gateway(worker, module_gateway):
    """A gateway that knows one of the keys, and both as its own."""
    keys = {"HEADWATER_LISTEN__API_KEYS": json.dumps(KEYS)}
    return module_gateway(worker.url, env={"HEADWATER_WORKERS__API_KEY": KEYS[0], **keys})


@pytest.fixture(params=["worker", "gateway"])
async def client(request, worker, gateway):
    """A client of either; the worker is idle after each test."""
    url = worker.url if request.param == "worker" else gateway.url
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as made:
        yield made

    async def idle() -> bool:
        async with httpx.AsyncClient(trust_env=False) as http:
            key = {"Authorization": f"Bearer {KEYS[0]}"}
            load = (await http.get(f"{worker.url}/headwater/load", headers=key)).json()
        return load["running"] == load["waiting"] == load["blocks_used"] == 0

    await settles(idle, 2.0)


def asked(number: int, path: str = CHAT, **more: Any) -> dict[str, Any]:
    """The request with a number: a prompt of its own."""
    text = f"prompt number {number} with its own words"
    fields = {"model": "fake", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    return {**body_for(path, text), **fields, **more}


def head(number: int, request_id: str = "same") -> dict[str, str]:
    """Headers of a request."""
    return {"Authorization": f"Bearer {KEYS[number % 2]}", "X-Request-Id": request_id}


async def told(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> Any:
    """(text, id of the answer, echoed id)."""
    path = COMPLETIONS if "prompt" in body else CHAT
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(each) for each in data]
    else:
        chunks = [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = []
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or {}
        texts.append(choice.get("text") or said.get("content") or "")
    (answer_id,) = {chunk["id"] for chunk in chunks}
    return "".join(texts), answer_id, answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True, None], ids=["whole", "streamed", "mixed"])
async def test_twenty_at_once_with_one_id(client, stream) -> None:
    def body(number: int) -> dict[str, Any]:
        path = COMPLETIONS if number % 4 == 3 else CHAT
        streamed = number % 3 == 0 if stream is None else stream
        return asked(number, path, request_id="same", stream=streamed)

    alone = [await told(client, body(number), head(number, "alone")) for number in range(20)]
    assert len({text for text, _, _ in alone}) == 20
    # Those that are left would last for long.
    bodies = [body(n) | ({} if n % 4 else {"max_tokens": 2000}) for n in range(20)]
    tasks = [asyncio.create_task(told(client, each, head(n))) for n, each in enumerate(bodies)]
    await asyncio.sleep(0.03)
    for task in tasks[::4]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    answers = {n: r for n, r in enumerate(results) if not isinstance(r, BaseException)}
    assert len(answers) == 15
    assert all(answers[n][0] == alone[n][0] for n in answers)
    assert {echoed for _, _, echoed in answers.values()} == {"same"}
    ids = [each for _, each, _ in (*answers.values(), *alone)]
    assert len(set(ids)) == len(ids)
    assert not [each for each in ids if "same" in each or "alone" in each]


async def test_an_id_in_flight_can_be_used_again(client) -> None:
    """The first goes on while the second with the same id is aborted, and the other way round."""
    expected = (await told(client, asked(1), head(1)))[0]
    for first, second in ((1, 2), (2, 1)):
        tasks = {n: asyncio.create_task(told(client, asked(n), head(n))) for n in (first, second)}
        await asyncio.sleep(0.03)
        tasks[2].cancel()
        assert (await tasks[1])[0] == expected


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ("a", True),
        ("x" * 128, True),
        ("6f1c-4_b:c.D", True),
        ("x" * 129, False),
        ("a b", False),
        ("a,b", False),
        ("<b>", False),
        ('"', False),
        ("a/../b", False),
        ("{}", False),
        ("%0d%0aX: y", False),
        ("", False),
    ],
)
async def test_only_short_and_plain_ids_are_echoed(client, sent, echoed) -> None:
    seen = set()
    for body in (asked(1), asked(1, stream=True), {"model": "nobody", "messages": []}, {}):
        answer = await client.post(CHAT, json=body, headers=head(0, sent))
        got = answer.headers["x-request-id"]
        assert (got == sent) == echoed
        assert got
        seen.add(got)
    assert len(seen) == (1 if echoed else 4)
