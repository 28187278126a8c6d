"""Stub workers that behave like engines with a prefix cache: slots, a queue, ``cached_tokens``.

For cases in text-block mode, where 64 bytes of text count as 16 tokens.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from dialoguekit import ROUTES, Counts, rendered, request, told, usage_of
from rig import (
    CHAT,
    END,
    ROLE,
    SSE_HEAD,
    Script,
    Seen,
    Stub,
    ask,
    chunk,
    completion,
    delta,
    usage,
    usage_event,
)
from rig import DONE as DONE_EVENT
from rig import STOP as STOP_EVENT

BYTES_PER_TOKEN = 4
BLOCK = 64


def words(tokens: int, seed: int) -> str:
    """P(n): a fixed pseudo-random text of about n tokens, another one for each seed."""
    rng = Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    return "".join(rng.choice(letters) for _ in range(tokens * BYTES_PER_TOKEN))


def prompt_of(path: str, body: Any) -> str:
    """The text that an engine has in its cache, in the form that it begins with."""
    if path in ROUTES:
        return rendered(body).decode()
    if "messages" in body:
        return "".join(f"{m['role']}\n{m['content']}\n" for m in body["messages"])
    return str(body["prompt"])


class Engine:
    """Serves ``slots`` requests at a time, ``service_s`` each, and remembers prompts."""

    def __init__(self, stub: Stub, slots: int = 4, service_s: float = 0.2) -> None:
        self.stub, self.slots, self.service_s = stub, slots, service_s
        self._blocks: set[int] = set()
        """Of each whole block of each prompt: a hash of all text up to its end."""
        self.served: list[str] = []
        """Prompts of answered and running requests, in order of arrival."""
        self._free: list[float] = [0.0] * slots
        stub.respond = self.respond

    def warm(self, text: str) -> None:
        """As if the prompt had been served."""
        self._blocks.update(_chain(text))

    def cached(self, text: str) -> int:
        """Tokens of a prompt that are there; never its last one."""
        chain = _chain(text[: len(text) - 1])
        found = next(
            (at for at, block in enumerate(chain) if block not in self._blocks), len(chain)
        )
        return found * BLOCK // BYTES_PER_TOKEN

    def respond(self, seen: Seen) -> Script:
        """The answer after its place in the queue has come."""
        body, now = seen.json, time.monotonic()
        text = prompt_of(seen.target, body)
        begin = max(now, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + self.service_s)
        counts = (len(text) // BYTES_PER_TOKEN, 3, self.cached(text))
        self.warm(text)
        self.served.append(text)
        wait = begin + self.service_s - now
        if seen.target in ROUTES:
            spoken = usage_of(seen.target, Counts(counts[0], counts[2]))
            return [wait, *told(seen.target, bool(body.get("stream")), "id", spoken)]
        if body.get("stream"):
            events = ROLE + delta("ok") + STOP_EVENT + usage_event(*counts) + DONE_EVENT
            return [wait, SSE_HEAD, chunk(events), END]
        return [wait, *completion(usage=usage(*counts))]


def _chain(text: str) -> list[int]:
    chain, state = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        state = hash((state, text[end - BLOCK : end]))
        chain.append(state)
    return chain


def asked(path: str, text: str, **more: Any) -> Any:
    """A request of any route for an answer to this text."""
    from caserig import body_for

    return (
        (request(path, [("user", text)]) | more) if path in ROUTES else body_for(path, text, **more)
    )


async def post(url: str, text: str, path: str = CHAT, **more: Any) -> str:
    """One answered request; returns the worker that answered."""
    reply = await ask(url, path, asked(path, text, **more))
    assert reply.status == 200, reply.body
    assert reply.complete
    return str(reply.header("x-headwater-worker"))


def shares(workers: Sequence[str], stubs: Sequence[Stub]) -> list[int]:
    """How many requests went to each stub."""
    counts = Counter(workers)
    return [counts[stub.id] for stub in stubs]
