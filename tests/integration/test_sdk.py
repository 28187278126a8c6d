"""The official ``openai`` clients for Python and Node against a running gateway."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from uprig import Up, ready_workers, until

NODE_TESTS = Path(__file__).resolve().parents[1] / "node"
MESSAGES = [{"role": "user", "content": "Say hello to the world."}]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    cluster = Up(tmp_path_factory.mktemp("sdk"))
    cluster.await_line("ready ")
    until(lambda: ready_workers(cluster) == 2)
    yield cluster
    cluster.end()


@pytest.fixture
def client(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def inflight(up: Up) -> int:
    return sum(int(str(entry["inflight"])) for entry in up.workers())


def test_plain_and_streamed_chat_agree(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=8, temperature=0
    )
    text, finish, usage = "", None, None
    for chunk in client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    assert text == plain.choices[0].message.content != ""
    assert finish == plain.choices[0].finish_reason == "length"
    assert plain.usage is not None
    assert usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens == 8
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream_without_usage_has_no_empty_choices(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=4, temperature=0, stream=True
        )
    )
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_completions_of_text_and_of_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(model="fake", prompt="Once upon", max_tokens=8, temperature=0)
    assert text.choices[0].text
    tokens = client.completions.create(
        model="fake", prompt=[1, 2, 3, 4], max_tokens=3, temperature=0
    )
    assert tokens.usage is not None
    assert (tokens.usage.prompt_tokens, tokens.usage.completion_tokens) == (4, 3)


def test_models_are_listed_and_found_one_by_one(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model="fake", messages=[])
    assert empty.value.param == "messages"


def test_an_abort_frees_the_worker(client: openai.OpenAI, up: Up) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in zip(range(3), stream, strict=False):
        pass
    assert inflight(up) == 1
    stream.close()
    until(lambda: inflight(up) == 0, 2)

    def running() -> int:
        urls = [f"http://127.0.0.1:{up.worker_port + i}/headwater/load" for i in range(2)]
        return sum(httpx.get(url).json().get("running", 0) for url in urls)

    # the worker learns of it a moment later, when its socket is closed
    until(lambda: running() == 0, 2)


def test_the_node_client(up: Up) -> None:
    node = shutil.which("node")
    assert node is not None, "node is missing; `make setup` installs it"
    done = subprocess.run(
        [node, str(NODE_TESTS / "client.mjs"), f"{up.url}/v1", "fake"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["plain"] == seen["streamed"] != ""
    assert seen["finish"] == "length"
    assert seen["streamUsage"]["total_tokens"] == seen["usage"]["total_tokens"]
    assert seen["completion"]
    assert seen["models"] == ["fake"]
    assert seen["error"]["name"] == "NotFoundError"
    assert (seen["error"]["status"], seen["error"]["code"]) == (404, "model_not_found")
    assert 3 <= seen["abortedAfter"] < 400  # chunks that had arrived by then may still come
    until(lambda: inflight(up) == 0, 2)


SAID = [
    ("weather", '{"city": "Oslo", "days": [1, 2]}'),
    ("weather", '{"city": "Ørsta 🌍 </tool_call>"}'),
    ("now", "{}"),
]
TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
TOOL_REQUEST: dict[str, Any] = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "max_tokens": 600,
    "seed": 3,
}
TEXT = "Well.\n" + "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in SAID
)


def test_the_node_client_and_tool_calls(up: Up) -> None:
    node = shutil.which("node")
    assert node is not None, "node is missing; `make setup` installs it"
    request = {**TOOL_REQUEST, "guided_choice": [TEXT]}
    done = subprocess.run(
        [node, str(NODE_TESTS / "tools.mjs"), f"{up.url}/v1", "fake", json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["whole"] == {
        "finish": "tool_calls",
        "content": "Well.",
        "calls": [{"name": name, "arguments": text} for name, text in SAID],
    }
    streamed = seen["streamed"]
    assert [(call["name"], call["arguments"]) for call in streamed["calls"]] == SAID
    assert (streamed["finish"], streamed["content"]) == ("tool_calls", "Well.")
    assert seen["pieces"] > 30


def test_the_python_client_and_tool_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", **TOOL_REQUEST, extra_body={"guided_choice": [TEXT]}
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    (choice,) = final.choices
    calls = [call.function for call in choice.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == SAID
    assert choice.finish_reason == "tool_calls"
    assert events.count("tool_calls.function.arguments.delta") > 30
    assert events.count("tool_calls.function.arguments.done") == 3


def test_the_examples_print_what_was_cached_and_how_soon_they_were_answered(up: Up) -> None:
    folder = NODE_TESTS.parents[1] / "examples"
    running = {
        name: subprocess.Popen(
            [sys.executable, str(folder / f"{name}.py"), up.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("chat", "rag", "agent", "fewshot")
    }
    for name, process in running.items():
        told, wrong = process.communicate(timeout=60)
        assert process.returncode == 0, f"{name}: {wrong}"
        *_, last = told.splitlines()
        found = re.fullmatch(r"hit rate ([0-9.]+)%; first token after (\d+) ms .*", last)
        assert found is not None, f"{name}: {last}"
        assert float(found[1]) > 20, f"{name}: {told}"
        asked = [line for line in told.splitlines() if " prompt tokens, " in line]
        assert len(asked) >= 3
