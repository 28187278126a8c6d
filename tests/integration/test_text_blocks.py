"""Workers without a tokenizer or cache events: affinity by blocks of text, and what it is worth.

The stubs cache text as an engine caches tokens: blocks of 64 bytes, least recently used first, and
tell ``cached_tokens``, four bytes to a token.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
from caserig import metrics
from rig import CHAT, Script, Seen, ask, chat, completion, eventually, usage

from gateway.trustwatch import MUTE_AFTER


class Caching:
    """Plays a stub's part; ``tells``: whether it reports ``cached_tokens``."""

    def __init__(self, stub: Any, blocks: int = 10_000, *, tells: bool = True) -> None:
        self.stub, self.blocks, self.tells = stub, blocks, tells
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.prompt = self.cached = 0
        stub.respond = self.respond

    def respond(self, seen: Seen) -> Script:
        text = "".join(f"<|{m['role']}|>{m['content']}" for m in seen.json["messages"]).encode()
        whole = [text[: end + 64] for end in range(0, len(text) - 63, 64)]
        depth = next((n for n, block in enumerate(whole) if block not in self.cache), len(whole))
        for block in reversed(whole):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.blocks:
            self.cache.popitem(last=False)
        tokens = max(1, len(text) // 4)
        cached = min(16 * depth, tokens - 1)
        self.prompt += tokens
        self.cached += cached
        told = usage(tokens, 3, cached)
        if not self.tells:
            del told["prompt_tokens_details"]
        return completion("fine", usage=told)


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"{rng.getrandbits(24):06x}" for _ in range(count))


async def talk(url: str, system: str, rng: random.Random, turns: int) -> list[str]:
    """One conversation; the workers that served it."""
    messages = [{"role": "system", "content": system}]
    served = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(rng, 20)})
        reply = await ask(url, CHAT, {"model": "m", "messages": messages})
        assert reply.status == 200
        served.append(reply.header("x-headwater-worker"))
        messages.append({"role": "assistant", "content": "fine"})
    return served


def statuses(served: Any) -> dict[str, Any]:
    return {status.id: status for status in served.gateway.router.workers(0.0)}


async def test_conversations_stay_where_their_text_is(stub, serve) -> None:
    rng = random.Random(1)
    workers = [Caching(await stub()) for _ in range(3)]
    served = await serve(*(worker.stub for worker in workers))
    homes = []
    for _ in range(9):
        places = await talk(served.url, words(rng, 150), rng, 5)
        homes.append(set(places))
    assert all(len(home) == 1 for home in homes), homes
    assert len(set().union(*homes)) == 3, "new conversations are spread"
    prompt, cached = (sum(getattr(w, name) for w in workers) for name in ("prompt", "cached"))
    assert cached > 0.7 * prompt
    for status in statuses(served).values():
        assert (status.trust, status.trust_reason) == ("learned", "no event feed")
    read = await metrics(served.admin)
    errors = {
        n: v for (n, labels), v in read.items() if "prediction_error_tokens" in n and not labels
    }
    assert errors["headwater_prediction_error_tokens_sum"] < 0.05 * prompt


async def test_a_small_cache_is_found_out_and_not_relied_on(stub, serve) -> None:
    rng = random.Random(2)
    worker = Caching(await stub(), blocks=120)
    served = await serve(worker.stub)
    prompts = [words(rng, 180) for _ in range(12)]
    for _ in range(8):
        for text in prompts:
            assert (await ask(served.url, CHAT, chat(text))).status == 200
    status = statuses(served)[worker.stub.id]
    assert status.learned_tokens < 12 * 20 * 16, "not all of the prompts"
    reply = await ask(served.url, CHAT, chat(prompts[0]))
    assert reply.header("x-headwater-matched-tokens") == "0"


async def test_a_restarted_engine_is_learned_anew(stub, serve) -> None:
    rng = random.Random(3)
    worker = Caching(await stub())
    served = await serve(worker.stub)
    prompts = [words(rng, 100) for _ in range(8)]
    for text in prompts:
        await ask(served.url, CHAT, chat(text))
    worker.cache.clear()
    for text in prompts[:3]:
        await ask(served.url, CHAT, chat(text))

    async def matched(text: str) -> int:
        return int((await ask(served.url, CHAT, chat(text))).header("x-headwater-matched-tokens"))

    assert [await matched(text) for text in prompts[3:6]] == [0, 0, 0]
    assert await matched(prompts[2]) > 100, "that one has been computed since"


async def test_an_engine_that_reports_nothing_is_shown_as_blind(stub, serve, log) -> None:
    rng = random.Random(4)
    worker = Caching(await stub(), tells=False)
    served = await serve(worker.stub)
    text = words(rng, 100)
    for _ in range(MUTE_AFTER + 2):
        assert (await ask(served.url, CHAT, chat(text))).status == 200
    assert statuses(served)[worker.stub.id].trust == "blind"
    read = await metrics(served.admin)
    name = "headwater_worker_trust"
    shown = {dict(labels)["state"]: value for (n, labels), value in read.items() if n == name}
    assert shown == {"exact": 0, "learned": 0, "blind": 1}
    listed = (await ask(served.admin, "/admin/workers")).json["workers"][0]
    assert (listed["trust"], listed["trust_reason"]) == ("blind", "it never reports cached_tokens")
    notes = (await ask(served.url, "/ready")).json["notes"]
    assert any("blind (it never reports cached_tokens)" in note for note in notes)
    assert '"event": "worker_trust"' in log.getvalue()
    worker.tells = True
    for _ in range(2):
        await ask(served.url, CHAT, chat(text))
    await eventually(lambda: statuses(served)[worker.stub.id].trust == "learned")


@pytest.mark.parametrize("tokens_per_four_bytes", [0.6, 1.0, 1.7])
async def test_text_that_is_no_four_bytes_a_token_is_no_error(
    stub, serve, tokens_per_four_bytes
) -> None:
    rng = random.Random(5)
    worker = Caching(await stub())
    served = await serve(worker.stub)
    respond = worker.respond

    def scaled(seen: Seen) -> Script:
        respond(seen)
        text = sum(len(m["content"]) for m in seen.json["messages"])
        tokens = int(text / 4 * tokens_per_four_bytes)
        cached = 0 if len(worker.stub.seen) == 1 else int(tokens * 0.9)
        return completion("fine", usage=usage(tokens, 3, cached))

    worker.stub.respond = scaled
    system = words(rng, 300)
    for _ in range(40):
        body = {"model": "m", "messages": [{"role": "system", "content": system}]}
        body["messages"].append({"role": "user", "content": words(rng, 20)})
        await ask(served.url, CHAT, body)
    status = statuses(served)[worker.stub.id]
    assert status.trust == "learned"
    assert status.prediction_error is None or status.prediction_error < 0.1
    assert status.learned_tokens > 50_000
