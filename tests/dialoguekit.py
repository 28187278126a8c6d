"""Requests and answers of ``/v1/responses`` and ``/v1/messages``, and stubs that serve them.

Each request can be put in the two ways in which clients put the same words: contents as strings,
or as lists of parts with what clients add to them (ids, states, moving ``cache_control``).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from rig import END, SSE_HEAD, Reply, Script, Seen, Stub, answer, ask, chunk

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ROUTES = (RESPONSES, MESSAGES)
FORMS = ("strings", "parts", "mixed")
ANSWER = "That is fine with me. 🌍"
KEYS = {"listen.api_keys": "sk-one,sk-two"}
either_route = pytest.mark.parametrize("route", ROUTES)
either_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
Turn = tuple[str, str]
"""Role and text."""


def words(rng: random.Random, count: int) -> str:
    """Text that no other call gives."""
    return " ".join(f"{rng.getrandbits(24):06x}" for _ in range(count))


# --- requests ------------------------------------------------------------------------------------


def content_of(route: str, role: str, text: str, last: bool) -> list[dict[str, Any]]:
    """A text as a list of one part, with what clients of the route add to it."""
    if route == MESSAGES:
        return [{"type": "text", "text": text, **({"cache_control": CACHED} if last else {})}]
    if role == "assistant":
        return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": text}]


CACHED = {"type": "ephemeral"}


def item_of(route: str, turn: Turn, number: int, parts: bool, last: bool = False) -> dict[str, Any]:
    """A turn as a message of the route."""
    role, text = turn
    if not parts:
        return {"role": role, "content": text}
    item = {"role": role, "content": content_of(route, role, text, last)}
    if route == RESPONSES and role == "assistant":
        return {"type": "message", "id": f"msg_{number}", "status": "completed", **item}
    return item


def request(
    route: str, turns: Sequence[Turn], system: str = "", *, parts: bool = False, **more: Any
) -> dict[str, Any]:
    """A conversation so far."""
    ends = len(turns) - 1
    items = [item_of(route, turn, at, parts, at == ends) for at, turn in enumerate(turns)]
    if route == MESSAGES:
        told: Any = [{"type": "text", "text": system}] if parts and system else system
        named = {"system": told} if system else {}
        return {"model": "m", "max_tokens": 9, **named, "messages": items, **more}
    said: Any = turns[0][1] if not parts and len(turns) == 1 else items
    named = {"instructions": system} if system else {}
    return {"model": "m", **named, "input": said, **more}


def going_on(previous: object, text: str, **more: Any) -> dict[str, Any]:
    """The next turn of a stored response."""
    return {"model": "m", "input": text, "previous_response_id": previous, **more}


def with_tools(route: str, **more: Any) -> list[dict[str, Any]]:
    """One tool; ``more`` goes into it."""
    text = words(random.Random(3), 40)
    if route == MESSAGES:
        return [{"name": "f", "description": text, "input_schema": {"type": "object"}, **more}]
    return [{"type": "function", "name": "f", "description": text, "parameters": {}, **more}]


SYSTEM = words(random.Random(4), 60)
TURNS = [
    ("user", words(random.Random(5), 60)),
    ("assistant", "naïve 🌍 " + words(random.Random(6), 60)),
    ("user", words(random.Random(7), 60)),
]


def base(route: str, **more: Any) -> dict[str, Any]:
    """A request with a tool, a system text and three turns."""
    return request(route, TURNS, SYSTEM, **{"tools": with_tools(route), **more})


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """What an answer says it took. ``cached`` None: it does not say; ``written``: to the cache."""

    prompt: int
    cached: int | None
    output: int = 3
    written: int = 0


def usage_of(route: str, counts: Counts) -> dict[str, Any]:
    """A ``usage`` object of the route."""
    cached = counts.cached
    if route == RESPONSES:
        details = {} if cached is None else {"input_tokens_details": {"cached_tokens": cached}}
        total = counts.prompt + counts.output
        told = {"input_tokens": counts.prompt, "output_tokens": counts.output}
        return {**told, "total_tokens": total, **details}
    own = {"input_tokens": counts.prompt - (cached or 0) - counts.written}
    if cached is not None:
        own["cache_read_input_tokens"] = cached
    if counts.written:
        own["cache_creation_input_tokens"] = counts.written
    return {**own, "output_tokens": counts.output}


def named(kind: str, **more: Any) -> bytes:
    """An event with its name."""
    data = json.dumps({"type": kind, **more}, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


def opening(route: str, name: str, usage: Any = None) -> list[bytes]:
    """Events before any content."""
    if route == RESPONSES:
        begun = {"id": name, "object": "response", "status": "in_progress", "usage": None}
        return [named("response.created", response=begun), named("response.in_progress")]
    message: dict[str, Any] = {"id": name, "type": "message", "role": "assistant", "content": []}
    if usage is not None:
        message["usage"] = usage
    block = {"type": "text", "text": ""}
    start = named("message_start", message=message)
    return [start, named("content_block_start", index=0, content_block=block), named("ping")]


def whole(route: str, name: str, usage: Any) -> dict[str, Any]:
    """A complete answer."""
    if route == MESSAGES:
        part = {"type": "text", "text": ANSWER}
        base = {"id": name, "type": "message", "role": "assistant", "model": "m"}
        return {**base, "content": [part], "stop_reason": "end_turn", "usage": usage}
    part = {"type": "output_text", "text": ANSWER, "annotations": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    base = {"id": name, "object": "response", "status": "completed", "model": "m", "error": None}
    return {**base, "output": [{**item, "content": [part]}], "usage": usage}


def events_of(route: str, name: str, usage: Any, *, told: str = "start", ends: str = "") -> Any:
    """All events of a stream.

    :param told: Messages only: figures come at the ``start`` (but for the output), ``twice``, or
        only at the ``end``.
    :param ends: last event of a Responses stream in place of ``response.completed``.
    """
    if route == RESPONSES:
        text = named("response.output_text.delta", delta=ANSWER)
        last = named(ends or "response.completed", response=whole(route, name, usage))
        return [*opening(route, name), text, last]
    begun = {**usage, "output_tokens": 1} if told != "end" and isinstance(usage, dict) else None
    late = usage
    if told == "start" and isinstance(usage, dict):
        late = {key: usage[key] for key in ("output_tokens",) if key in usage}
    text = named("content_block_delta", index=0, delta={"type": "text_delta", "text": ANSWER})
    stop = named("message_delta", delta={"stop_reason": "end_turn"}, usage=late)
    end = [named("content_block_stop", index=0), stop, named("message_stop")]
    return [*opening(route, name, begun), text, *end]


def script(events: Sequence[bytes], *end: Any) -> Script:
    """An event stream."""
    return [SSE_HEAD, *(chunk(each) for each in events), *(end or (END,))]


def told(route: str, stream: bool, name: str, usage: Any, **more: Any) -> Script:
    """An answer, streamed or not."""
    if stream:
        return script(events_of(route, name, usage, **more))
    return answer(whole(route, name, usage))


def id_of(reply: Reply) -> str:
    """The id that a client reads in an answer of Responses."""
    assert reply.status == 200, reply.body
    assert reply.complete
    streamed = "event-stream" in (reply.header("content-type") or "")
    value = json.loads(reply.events[0])["response"] if streamed else reply.json
    return str(value["id"])


# --- stubs ---------------------------------------------------------------------------------------


def rendered(body: dict[str, Any]) -> bytes:
    """The prompt as this engine's template makes it."""
    pieces = [str(tool.get("description")) for tool in body.get("tools") or []]
    pieces += _texts(body.get("instructions") or body.get("system") or [])
    said = body.get("messages") or body.get("input") or []
    for item in [{"role": "user", "content": said}] if isinstance(said, str) else said:
        pieces += [f"<|{item.get('role')}|>", *_texts(item.get("content") or [])]
    return "".join(pieces).encode()


def _texts(content: Any) -> list[str]:
    parts = [content] if isinstance(content, str) else content
    return [part if isinstance(part, str) else str(part.get("text")) for part in parts]


class Speaker:
    """Plays a stub's part on both routes: it caches text in blocks of 64 bytes, four to a token.

    :param prefill_s: seconds that each token takes that it did not find.

    ``says``: what is told of the cached tokens that it found; None leaves the figure out.
    """

    def __init__(self, stub: Stub, prefill_s: float = 0.0) -> None:
        self.stub, self.prefill_s = stub, prefill_s
        self.cache: set[bytes] = set()
        self.says: Callable[[int], int | None] = lambda found: found
        self.play: Script | None = None
        """If set: what every request gets."""
        self.given: list[str] = []
        """Ids of its answers."""
        stub.respond = self.respond

    def respond(self, seen: Seen) -> Script:
        """The answer to a request."""
        if self.play is not None:
            return self.play
        body = seen.json
        text = rendered(body)
        blocks = [text[: end + 64] for end in range(0, len(text) - 63, 64)]
        known = (at for at, block in enumerate(blocks) if block not in self.cache)
        tokens = max(1, len(text) // 4)
        found = min(16 * next(known, len(blocks)), tokens - 1)
        self.cache.update(blocks)
        self.given.append(f"resp_{self.stub.port}_{len(self.given)}")
        usage = usage_of(seen.target, Counts(tokens, self.says(found)))
        answered = told(seen.target, bool(body.get("stream")), self.given[-1], usage)
        return [self.prefill_s * (tokens - found), *answered]


async def say(url: str, route: str, body: Any, *headers: tuple[str, str]) -> Reply:
    """A request that is answered well."""
    reply = await ask(url, route, body, *headers)
    assert (reply.status, reply.complete) == (200, True), reply.body
    return reply


def matched(reply: Reply) -> int:
    """Tokens that the gateway believed its worker to hold."""
    return int(reply.header("x-headwater-matched-tokens") or 0)


def place(reply: Reply) -> str:
    """The worker that answered."""
    return str(reply.header("x-headwater-worker"))


async def spread(
    url: str, rng: random.Random, *headers: tuple[str, str], stream: bool = False
) -> dict[str, str]:
    """Responses of several workers: id -> worker."""
    given: dict[str, str] = {}
    for _ in range(12):
        body = request(RESPONSES, [("user", words(rng, 60))], stream=stream)
        reply = await say(url, RESPONSES, body, *headers)
        given[id_of(reply)] = place(reply)
    assert len(set(given.values())) > 1, "one worker proves nothing"
    return given


def bearer(key: str) -> tuple[str, str]:
    """The header of an API key."""
    return ("Authorization", f"Bearer {key}")
