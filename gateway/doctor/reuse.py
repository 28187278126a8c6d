"""One short prompt, sent to a worker twice: what came from the cache, and what its clock says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from secrets import token_hex
from typing import Any

import aiohttp
import msgspec

from gateway.decision import WorkerStatus
from gateway.parityforms import message

ANSWER_S = 60.0
"""A model on a CPU takes its time."""
BLOCKS = 3
WORDS = 64
"""... and so many words more, so that some whole block is repeated whatever its size."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What two equal prompts showed."""

    fault: str = ""
    """Why nothing was seen; empty if something was."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Of the second one; None: not reported."""
    skew_s: float | None = None
    """Its clock minus the one here, to half a second; None: it sends no Date."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


def probe_text(block_size: int, nonce: str) -> str:
    """Unlike every prompt before, and longer than ``BLOCKS`` blocks. Words are short, so that about
    each is one token."""
    count = BLOCKS * min(block_size, 1024) + WORDS
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "saw")
    return f"{nonce} " + " ".join(words[i % len(words)] for i in range(count))


async def try_reuse(
    session: aiohttp.ClientSession, status: WorkerStatus, headers: dict[str, str]
) -> Reuse:
    """Ask twice; any answer is a value."""
    model = status.models[0] if status.models else ""
    body: dict[str, Any] = {
        "model": model,
        "prompt": probe_text(status.block_size or 16, token_hex(8)),
        "max_tokens": 1,
        "temperature": 0,
    }
    first = await _complete(session, status.url, "/v1/completions", body, headers)
    if first.fault.startswith("404"):
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        first = await _complete(session, status.url, "/v1/chat/completions", body, headers)
    if first.fault:
        return first
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return await _complete(session, status.url, path, body, headers)


async def _complete(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
) -> Reuse:
    sent = time.time()
    try:
        async with session.post(
            url + path,
            data=msgspec.json.encode(body),
            headers={"content-type": "application/json", **headers},
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            allow_redirects=False,
        ) as response:
            head = time.time()
            data = await response.read()
            skew = _skew(response.headers.get("Date"), sent, head)
            if response.status != 200:
                return Reuse(f"{response.status} {message(data)}".strip(), skew_s=skew)
    except TimeoutError:
        return Reuse(f"no answer within {ANSWER_S:.0f} s")
    except aiohttp.ClientError as error:
        return Reuse(f"{type(error).__name__}: {error}"[:200])
    try:
        usage = msgspec.json.decode(data, type=_Completion).usage
    except (msgspec.DecodeError, RecursionError) as error:
        return Reuse(f"the answer cannot be read: {error}", skew_s=skew)
    if usage is None:
        return Reuse("the answer has no usage", skew_s=skew)
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return Reuse("", usage.prompt_tokens, cached, skew)


def _skew(date: str | None, sent: float, head: float) -> float | None:
    """Seconds that a Date header lies outside of the time between question and answer."""
    try:
        told = parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return None
    # the header is cut to whole seconds, and some servers make it once a second
    if told < sent - 2.0:
        return told - sent
    if told > head:
        return told - head
    return 0.0
