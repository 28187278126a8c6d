"""B16: every process computes the same keys for the same prompt.

Scaled: 10^6 pairs of texts are 10^6 comparisons of one block with a changed token.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from caserig import COMPLETIONS, GatewayProcess, wait_until
from rig import CHAT

from shared.blocks import GRANULE, Scope, chain_keys


def prompts(seed: str, n: int = 20) -> list[tuple[str, dict[str, Any]]]:
    """Route and body of ``n`` prompts of 300 tokens and more, of all kinds."""
    rng = random.Random(seed)
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(n):
        text = "".join(rng.choices("abcdefghijklmnop qrstuvwxyz üé你🌍", k=300))
        salt = {"cache_salt": f"tenant {number}"} if number % 3 == 0 else {}
        if number % 4 == 0:
            body: dict[str, Any] = {"prompt": text}
        elif number % 4 == 1:
            body = {"prompt": list(text.encode())}
        else:
            schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}}
            function = {"name": "f", "parameters": schema, "description": "d"}
            body = {"messages": [{"role": "user", "content": text}]}
            if number % 4 == 3:
                body["tools"] = [{"type": "function", "function": function}]
        path = CHAT if "messages" in body else COMPLETIONS
        made.append((path, {"model": "fake", "max_tokens": 2, "temperature": 0, **body, **salt}))
    return made


def send(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> tuple[str, int, int]:
    """Worker, predicted and reported reuse."""
    answer = gateway.http.post(gateway.url + path, json=body)
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    matched = int(answer.headers["x-headwater-matched-tokens"])
    return answer.headers["x-headwater-worker"], matched, cached


def knows(gateway: GatewayProcess, body: dict[str, Any], worker: str) -> bool:
    """Whether it believes that this worker, and no other, holds a part of the prompt."""
    held = gateway.explain(body)
    return held[worker] >= 256 and all(held[name] < 200 for name in held if name != worker)


def warm(gateway: GatewayProcess, asked: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Send each prompt once, each as soon as the one before is known; the workers that got them.

    They are drained in turn: an idle gateway may think one of them the faster, and all prompts on
    one worker would prove nothing.
    """
    placed = {}
    names = [worker["id"] for worker in gateway.workers()]
    for turn, drained in enumerate(names):
        gateway.http.post(f"{gateway.admin}/admin/workers/{drained}/drain").raise_for_status()
        for number in range(turn, len(asked), len(names)):
            path, body = asked[number]
            worker, matched, cached = send(gateway, path, body)
            assert worker != drained
            assert matched == cached < 200  # the tools that some prompts begin with
            wait_until(lambda body=body, worker=worker: knows(gateway, body, worker))
            placed[number] = worker
        gateway.http.post(f"{gateway.admin}/admin/workers/{drained}/undrain").raise_for_status()
    return [placed[number] for number in range(len(asked))]


def same_workers(
    gateway: GatewayProcess, asked: list[tuple[str, dict[str, Any]]], placed: list[str]
) -> None:
    """Each prompt goes where it was, and its blocks are there."""
    for (path, body), worker in zip(asked, placed, strict=True):
        wait_until(lambda body=body, worker=worker: knows(gateway, body, worker))
        got, matched, cached = send(gateway, path, body)
        assert got == worker
        assert matched == cached >= 256


def started(gateway_process, redis: str, seed: str | None) -> GatewayProcess:
    """A gateway with that hash seed that follows both workers."""
    made: GatewayProcess = gateway_process(redis=redis, env={"PYTHONHASHSEED": seed})
    made.await_exact(2)
    return made


@pytest.mark.redis
def test_two_gateways_with_other_hash_seeds_and_two_without(pair, gateway_process) -> None:
    redis = pair.redis.url
    asked = prompts("B16")
    first = started(gateway_process, redis, "1")
    second = started(gateway_process, redis, "2")
    placed = warm(first, asked)
    same_workers(second, asked, placed)
    more = prompts("B16, the other way round")
    placed_more = warm(second, more)
    same_workers(first, more, placed_more)
    first.stop()
    second.stop()
    third = started(gateway_process, redis, None)
    fourth = started(gateway_process, redis, None)
    same_workers(third, asked, placed)
    same_workers(fourth, more, placed_more)


@pytest.mark.redis
def test_other_surroundings_do_not_matter(pair, gateway_process) -> None:
    """Time zone, locale and the order of things in the environment."""
    redis = pair.redis.url
    asked = prompts("B16, surroundings", 8)
    first = started(gateway_process, redis, "0")
    placed = warm(first, asked)
    env = {"TZ": "Asia/Kolkata", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONHASHSEED": "77"}
    other: GatewayProcess = gateway_process(redis=redis, env=env)
    other.await_exact(2)
    same_workers(other, asked, placed)


@pytest.mark.redis
def test_another_deployment_secret_has_other_keys(pair, gateway_process) -> None:
    """Sanity: the test above can fail. A gateway with a secret of its own knows nothing."""
    redis = pair.redis.url
    asked = prompts("B16, secret", 4)
    first = started(gateway_process, redis, "5")
    placed = warm(first, asked)
    same_workers(first, asked, placed)
    other: GatewayProcess = gateway_process(
        redis=redis, env={"HEADWATER_DEPLOYMENT__SECRET": "another secret"}
    )
    other.await_exact(2)
    for _, body in asked:
        assert set(other.explain(body).values()) == {0}
        assert max(first.explain(body).values()) >= 256


def test_texts_that_differ_in_one_token_share_no_key() -> None:
    rng = random.Random(16)
    root = Scope("m", "t").root(b"")
    keys: set[int] = set()
    expected = 0
    while expected < 1_000_000:
        tokens = [rng.randrange(50_000) for _ in range(GRANULE)]
        for place in (0, GRANULE // 2, GRANULE - 1):
            kept = tokens[place]
            for step in range(1, 200):
                tokens[place] = (kept + step) % 50_000
                keys.update(chain_keys(root, tokens))
            expected += 199
            tokens[place] = kept
        keys.update(chain_keys(root, tokens))
        expected += 1
    assert len(keys) == expected


@pytest.mark.parametrize("place", [0, 7, 15, 16, 31, 32, 47])
def test_one_token_changes_its_block_and_all_after_it(place) -> None:
    rng = random.Random(place)
    root = Scope("m", "t").root(b"")
    for _ in range(500):
        tokens = [rng.randrange(50_000) for _ in range(3 * GRANULE)]
        other = [*tokens]
        other[place] = (other[place] + rng.randrange(1, 50_000)) % 50_000
        one, two = chain_keys(root, tokens), chain_keys(root, other)
        first = place // GRANULE
        assert one[:first] == two[:first]
        assert set(one[first:]).isdisjoint(two)
