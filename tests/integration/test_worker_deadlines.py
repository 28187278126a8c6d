"""``x-headwater-timeout`` at a worker: a proper status before the first byte, an event after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from conftest import WorkerLauncher, WorkerProcess

from tests.workerrig import CHAT, COMPLETIONS, Client, chat, completion, error_of, until

SLOW = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "1000",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "10",
    "HEADWATER_SCHEDULE__MAX_BATCH_TOKENS": "3000",
    "HEADWATER_SCHEDULE__MAX_RUNNING": "1",
}


@pytest.fixture(scope="module")
def slow_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A prompt of 2,800 tokens is one step of 2.8 seconds."""
    launcher = WorkerLauncher(tmp_path_factory.mktemp("slow"))
    yield launcher(env=SLOW)
    launcher.end()


@pytest.fixture
async def client(slow_worker: WorkerProcess) -> AsyncIterator[Client]:
    async with Client(slow_worker.url) as made:
        yield made
        await until(lambda: idle(made))


async def idle(client: Client) -> bool:
    load = await client.load()
    return (load["running"], load["waiting"], load["blocks_used"]) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_late_before_the_first_byte(client: Client, path: str, stream: bool) -> None:
    """In the middle of a step that takes 2.8 seconds."""
    make = chat if path == CHAT else completion
    body = make("x" * 2800, stream=stream, cache_salt=f"{path} {stream}")
    answer = await client.post(path, body, x_headwater_timeout="0.3")
    assert answer.status_code == 504
    assert error_of(answer)["code"] == "deadline_exceeded"
    assert answer.elapsed.total_seconds() < 2.6


async def test_late_in_a_whole_answer(client: Client) -> None:
    body = completion("abc", max_tokens=3000, ignore_eos=True)
    answer = await client.post(COMPLETIONS, body, x_headwater_timeout="0.3")
    assert answer.status_code == 504
    assert error_of(answer)["type"] == "server_error"


async def test_late_in_a_stream(client: Client) -> None:
    body = completion("abc", max_tokens=3000, ignore_eos=True, stream=True)
    answer = await client.post(COMPLETIONS, body, x_headwater_timeout="2")
    assert answer.status_code == 200
    events = answer.text.split("\n\n")
    assert "deadline_exceeded" in events[-2]
    assert events[-2].startswith('data: {"error":{')
    assert "[DONE]" not in answer.text
    assert len(events) > 5, "what had come in time was sent"


async def test_in_time(client: Client) -> None:
    for value in ("20", "1e9", "+.5e3", "9."):
        answer = await client.post(
            COMPLETIONS, completion("abc", max_tokens=3), x_headwater_timeout=value
        )
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "value", ["0", "-1", "soon", "nan", "inf", "1e999", "1_0", "0x10", "", "1s"]
)
async def test_no_number_of_seconds(client: Client, value: str) -> None:
    answer = await client.post(COMPLETIONS, completion("abc"), x_headwater_timeout=value)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "x-headwater-timeout"
