"""B03: load counts from the moment a worker is chosen, not from its first byte.

Scaled: the workers answer nothing until the test is over, instead of for 5 s.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, counts, inflight
from dialoguekit import request
from rig import CHAT, HANG, ROLE, SSE_HEAD, ask, chat, chunk, completion, eventually


def bodies(kind: str, n: int) -> tuple[str, list[dict[str, Any]]]:
    """Route and ``n`` requests that share nothing worth mentioning."""
    rng = random.Random(kind)
    texts = [f"{rng.getrandbits(64):x} " * rng.randint(18, 24) for _ in range(n)]
    if kind == "embeddings":
        return "/v1/embeddings", [{"model": "m", "input": text} for text in texts]
    if kind.split(maxsplit=1)[0] in ("responses", "messages"):
        path = f"/v1/{kind.split(maxsplit=1)[0]}"
        streamed = "stream" in kind
        return path, [request(path, [("user", text)], stream=streamed) for text in texts]
    if kind == "token ids":
        ids = [[rng.randrange(1000) for _ in range(60)] for _ in range(n)]
        return COMPLETIONS, [{"model": "m", "prompt": each, "stream": True} for each in ids]
    path = COMPLETIONS if "completion" in kind else CHAT
    streamed = "stream" in kind
    if kind == "equal prompts":
        texts = ["the same short text"] * n
    return path, [body_for(path, text, stream=streamed) for text in texts]


KINDS = (
    "chat stream",
    "chat",
    "completion stream",
    "completion",
    "token ids",
    "embeddings",
    "responses",
    "responses stream",
    "messages",
    "messages stream",
    "equal prompts",
)


@pytest.mark.parametrize("silence", ["before the head", "after the role"])
@pytest.mark.parametrize("kind", KINDS)
async def test_forty_at_once_are_spread(stub, serve, dial, kind, silence) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays([HANG] if silence == "before the head" else [SSE_HEAD, chunk(ROLE), HANG])
    path, requests = bodies(kind, 40)
    for body in requests:
        client = await dial(served.url)
        await client.send("POST", path, json.dumps(body).encode())
    await eventually(lambda: sum(counts(workers)) == 40)
    assert all(7 <= share <= 13 for share in counts(workers)), counts(workers)
    assert sorted((await inflight(served.admin)).values()) == sorted(map(float, counts(workers)))


async def test_one_after_the_other_within_a_second(stub, serve, dial) -> None:
    """Each is sent when the one before it has reached its worker."""
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays([HANG])
    path, requests = bodies("chat", 40)
    for number, body in enumerate(requests, 1):
        client = await dial(served.url)
        await client.send("POST", path, json.dumps(body).encode())
        await eventually(lambda number=number: sum(counts(workers)) == number)
        assert max(counts(workers)) - min(counts(workers)) <= 6
    assert all(7 <= share <= 13 for share in counts(workers)), counts(workers)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
async def test_ties_are_not_all_sent_to_the_first(stub, serve, path) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays(completion())
    for n in range(8):
        body = {**body_for(path, f"{n} unlike the others {n * 7919}"), "input": "x"}
        assert (await ask(served.url, path, body)).status == 200
    assert max(counts(workers)) < 8
    assert sum(share > 0 for share in counts(workers)) >= 2


async def test_a_slow_worker_is_not_the_favourite(stub, serve, dial) -> None:
    """One worker hangs, the others answer at once: it gets what it deserves."""
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers[1:]:
        worker.plays(completion())
    workers[0].plays([HANG])
    for n in range(40):
        client = await dial(served.url)
        await client.send("POST", CHAT, json.dumps(chat(f"{n} x {n * 31}")).encode())
        await eventually(lambda n=n: sum(counts(workers)) == n + 1)
    assert len(workers[0].seen) <= 10
