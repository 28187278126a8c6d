"""B14: the gateway counts and hashes the very tokens that the engine computes.

E and E2 are two worker processes without torch (byte tokenizer, ChatML), fed through Redis. One
test uses a real model with merges and a BOS that template and tokenizer both add.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from caserig import COMPLETIONS, GatewayProcess, wait_until
from rig import CHAT

BLOCK = 16


@pytest.fixture(scope="module")
def gateway(pair, module_gateway) -> GatewayProcess:
    """G in front of E and E2."""
    made = module_gateway(redis=pair.redis.url)
    made.await_exact(2)
    return made


@pytest.fixture
def http(gateway) -> Iterator[httpx.Client]:
    """A client of G."""
    with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:
        yield client


class Turn:
    """What one answer says about itself."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        body = answer.json()
        usage, headers = body["usage"], answer.headers
        self.choice = body["choices"][0]
        self.worker = headers["x-headwater-worker"]
        self.counted = int(headers["x-headwater-prompt-tokens"])
        self.prompt = int(usage["prompt_tokens"])
        self.predicted = int(headers["x-headwater-matched-tokens"])
        self.cached = int(usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def agrees(self) -> bool:
        """Predicted and reported reuse differ by at most one block."""
        return abs(self.predicted - self.cached) <= BLOCK


def ask(http: httpx.Client, path: str, **fields: Any) -> Turn:
    """One greedy request."""
    body = {"model": "fake", "temperature": 0, "max_tokens": 12, **fields}
    return Turn(http.post(path, json=body))


def talk(http: httpx.Client, seed: int, turns: int = 10) -> list[Turn]:
    """A conversation with a system prompt of 1000 tokens; each turn sends all of it."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": text(rng, 1000)}]
    made = []
    for _ in range(turns):
        messages.append({"role": "user", "content": text(rng, rng.randint(20, 120))})
        made.append(ask(http, CHAT, messages=messages, ignore_eos=True))
        messages.append(made[-1].choice["message"])
    return made


def text(rng: random.Random, length: int) -> str:
    """ASCII text without structure."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz     ", k=length))


def check(turns: list[Turn]) -> None:
    """All but the first on one worker, with reuse that was predicted."""
    assert len({turn.worker for turn in turns[1:]}) == 1
    assert all(turn.counted == turn.prompt for turn in turns)
    assert sum(turn.agrees for turn in turns) >= 0.95 * len(turns)
    assert turns[0].cached == 0
    # All of what was sent before, but what lies in a block that was not full.
    for before, now in pairwise(turns):
        assert now.cached >= before.prompt - BLOCK
        assert now.predicted > 0


def test_ten_turns_with_a_system_prompt_of_a_thousand_tokens(http) -> None:
    every = [talk(http, seed) for seed in range(4)]
    for turns in every:
        check(turns)
    assert len({turns[1].worker for turns in every}) <= 2


@pytest.mark.parametrize("kind", ["text", "token ids"])
def test_completions(http, kind) -> None:
    for seed in range(3):
        rng = random.Random(f"{kind} {seed}")
        prompt, turns = text(rng, 1000), []
        for _ in range(10):
            sent: Any = prompt if kind == "text" else list(prompt.encode())
            turns.append(ask(http, COMPLETIONS, prompt=sent, ignore_eos=True))
            prompt += turns[-1].choice["text"] + text(rng, rng.randint(20, 120))
        check(turns)


def test_text_and_its_token_ids_are_one_prompt(http) -> None:
    prompt = text(random.Random(7), 800)
    first = ask(http, COMPLETIONS, prompt=prompt)
    second = ask(http, COMPLETIONS, prompt=list(prompt.encode()))
    assert (first.cached, second.cached, second.predicted) == (0, 784, 784)
    assert first.worker == second.worker


def test_several_prompts_are_counted_together(http) -> None:
    rng = random.Random(9)
    texts = [text(rng, 14), text(rng, 9), "ü🌍"]
    for prompts in (texts, [list(each.encode()) for each in texts]):
        turn = ask(http, COMPLETIONS, prompt=prompts)
        assert turn.counted == turn.prompt == 14 + 9 + 6


def test_a_salt_is_part_of_the_prompt(http) -> None:
    shared = text(random.Random(8), 600)
    for path, fields in (
        (CHAT, {"messages": [{"role": "user", "content": shared}]}),
        (COMPLETIONS, {"prompt": shared}),
    ):
        for salt in ({}, {"cache_salt": "t1"}, {"cache_salt": "t2"}, {"cache_salt": "ü t"}):
            cold = ask(http, path, **fields, **salt)
            assert (cold.predicted, cold.cached) == (0, 0), salt
            warm = ask(http, path, **fields, **salt)
            assert warm.predicted == warm.cached > 500
            assert warm.worker == cold.worker
        null = ask(http, path, **fields, cache_salt=None)
        assert null.predicted == null.cached > 500


PIECES = (
    *(
        "hello",
        "  two  spaces ",
        "\n\n",
        "\ttab",
        "ümläut",
        "你好，世界",
        "🌍🚀👩‍👩‍👧‍👦",
        "e\u0301",
    ),
    *("שלום", "\u202e", "\u0000", "\ufffd", "\u2028", "<|im_end|>", "<|im_start|>user\n"),
    *("<|endoftext|>", "<s>", "</s>", "{{ x }}", "{% if %}", '"quoted" \\ back', "x" * 200),
    *("\r\n", " ", "", "1234567", "ﬁ", "ẞ", "\U0001f9ff", "a\u0300\u0316", "İi", "𝔘"),
)


def random_chat(rng: random.Random) -> dict[str, Any]:
    """Messages of all roles and shapes, with and without tools."""

    def words() -> str:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 6)))

    def content() -> Any:
        shape = rng.random()
        if shape < 0.7:
            return words()
        parts = [{"type": "text", "text": words()} for _ in range(rng.randint(0, 3))]
        return parts if shape < 0.95 else None

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(["", words(), " "])})
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": content() or ""})
        if rng.random() < 0.4:
            arguments = rng.choice(["{}", '{"a": "ü", "b": [1, 2.50, null]}', '{"z":1,"a":2}'])
            function = {"name": "look_up", "arguments": arguments}
            call = {"id": f"c{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "tool_calls": [call], "content": content()})
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": words()})
        messages.append({"role": "assistant", "content": content()})
    messages.append({"role": "user", "content": words(), "name": "someone"})
    body: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.3:
        schema = {
            "type": "object",
            "properties": {"z": {"type": "string"}, "a": {"type": "integer"}},
        }
        function = {"name": "look_up", "description": words(), "parameters": schema}
        body["tools"] = [{"type": "function", "function": function}]
    if rng.random() < 0.2:
        body["add_generation_prompt"] = False
    if rng.random() < 0.1:
        body["messages"] = [*messages, {"role": "assistant", "content": "and so"}]
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def random_chats(http: httpx.Client, rng: random.Random, n: int, **drop: None) -> None:
    """Send random chats twice: counted alike each time, reuse as predicted in 95 % of them."""
    good = 0
    for _ in range(n):
        chat = {key: value for key, value in random_chat(rng).items() if key not in drop}
        first, again = (ask(http, CHAT, max_tokens=1, **chat) for _ in range(2))
        assert (first.counted, again.counted) == (first.prompt, again.prompt), chat
        full = (again.prompt - 1) // BLOCK * BLOCK
        good += first.agrees and again.predicted == again.cached == full
    assert good >= 0.95 * n


def test_a_hundred_random_chats_are_counted_alike(http) -> None:
    random_chats(http, random.Random(14), 100)


def test_a_stream_says_the_same(http) -> None:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": text(random.Random(15), 500)}],
        "max_tokens": 3,
        "temperature": 0,
    }
    whole = Turn(http.post(CHAT, json=body))
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", CHAT, json=streamed) as answer:
        last = [line for line in answer.iter_lines() if '"usage":{' in line.replace(" ", "")][-1]
    assert f'"cached_tokens":{(whole.prompt - 1) // BLOCK * BLOCK}' in last.replace(" ", "")
    assert int(answer.headers["x-headwater-matched-tokens"]) == (whole.prompt - 1) // BLOCK * BLOCK


def test_reuse_is_not_expected_of_prompts_that_are_scored(http) -> None:
    prompt = list(range(97, 117)) * 4
    for scored in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        for turn in range(2):
            ask(http, COMPLETIONS, prompt=[*prompt, 98 + turn])
            told = ask(http, COMPLETIONS, prompt=prompt, **scored)
            assert (told.predicted, told.cached) == (0, 0)
            assert told.counted == told.prompt == 80


def test_what_it_says_it_knows_is_what_the_ledger_of_errors_shows(gateway) -> None:
    """All tests before this one: hardly any token was predicted wrongly."""
    lines = gateway.http.get(f"{gateway.admin}/metrics").text.splitlines()

    def sample(start: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    predicted = sample('headwater_overlap_tokens_total{model="fake",stage="captured"}')
    wrong = sample("headwater_prediction_error_tokens_sum")
    assert predicted > 10_000
    assert wrong < 0.005 * predicted
    assert sample('headwater_loss_tokens_total{model="fake",reason="token_mismatch"}') == 0


@pytest.mark.torch
def test_a_real_model_with_merges_and_a_doubled_bos(
    tmp_path, worker_process, gateway_process
) -> None:
    pytest.importorskip("torch")
    from casemodel import merging_model

    folder = merging_model(tmp_path / "merging")
    process = worker_process(
        "--model", str(folder), "--served-model-name", "fake", "--threads", "1",
        "--kv-blocks", "1024",
    )  # fmt: skip
    made = gateway_process(process.url)
    wait_until(lambda: made.workers()[0]["trust"] == "exact")
    with httpx.Client(base_url=made.url, timeout=60, trust_env=False) as http:
        rng = random.Random(16)
        random_chats(http, rng, 30, tools=None)
        for pieces in (1, 5, 30):
            prompt = "the river " * 20 + "".join(rng.choices(PIECES, k=pieces))
            for _ in range(2):
                turn = ask(http, COMPLETIONS, max_tokens=1, prompt=prompt)
                assert turn.counted == turn.prompt
            assert turn.predicted == turn.cached > 0
        messages = [{"role": "system", "content": "tell the user about the river " * 60}]
        turns = []
        for _ in range(6):
            messages.append({"role": "user", "content": text(rng, 60)})
            turns.append(ask(http, CHAT, max_tokens=6, messages=messages))
            messages.append(turns[-1].choice["message"])
        assert all(turn.counted == turn.prompt for turn in turns)
        assert sum(turn.agrees for turn in turns) >= 0.95 * len(turns)
