"""What the engines' own code encodes, and what they say of themselves, is read as it was meant.

``golden/`` is made by ``scripts/golden_frames.py`` and ``scripts/golden_llamacpp.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engines import catalogue
from gateway.engines.base import MalformedFrame, Reading, Reports, Stored
from gateway.engines.keymap import KeyMap
from shared.blocks import Scope, chain_keys
from shared.types import Tier

FOLDER = Path(__file__).with_name("golden")
RELEASES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*-*.json"))}
FRAMES = [
    pytest.param(told["engine"], name, bytes.fromhex(frame), id=f"{release}-{name}")
    for release, told in RELEASES.items()
    for name, frame in told["frames"].items()
]
TOKENS = list(range(64))


def root(adapter: str, salt: str) -> bytes | None:
    return Scope("m", "tok", adapter=adapter, salt=salt).root(b"s")


def keys(blocks: int, adapter: str = "", salt: str = "") -> set[int]:
    begin = root(adapter, salt)
    assert begin is not None
    return {int(key) for key in chain_keys(begin, TOKENS[: blocks * 16])}


def contents(engine: str, payload: bytes, size: int = 16) -> dict[Tier, set[int]]:
    """What an index would hold after one frame."""
    keymap = KeyMap(root, size)
    keymap.take(catalogue.engine(engine).decode(payload), 0.0)
    return {tier: set(held) for tier, held in keymap.contents().items()}


def test_the_fixtures_are_of_both_encodings_and_say_where_they_come_from() -> None:
    assert {"vllm-0.11.2", "vllm-0.23.0", "vllm-0.33.0"} <= RELEASES.keys()
    assert {"sglang-0.5.16", "sglang-0.5.23"} <= RELEASES.keys()
    for told in RELEASES.values():
        assert re.fullmatch("[0-9a-f]{64}", told["sha256"])
        assert told["version"] in told["file"]
    first = {name: bytes.fromhex(told["frames"]["chain"]) for name, told in RELEASES.items()}
    assert b"\xa4type" in first["vllm-0.33.0"]
    assert b"\xa4type" not in first["vllm-0.23.0"]
    assert b"\xa4type" in first["sglang-0.5.23"]


@pytest.mark.parametrize(("engine", "name", "payload"), FRAMES)
def test_every_golden_frame_means_what_it_was_made_of(
    engine: str, name: str, payload: bytes
) -> None:
    frame = catalogue.engine(engine).decode(payload)
    assert (frame.malformed, frame.unknown, frame.at) == (0, 0, 1.5)
    held = contents(engine, payload)
    expected = {
        "chain": keys(3),
        "removed": keys(1),
        "cleared": keys(1),
        "host": set(),
        "digests": keys(2),
        "salt": keys(2, salt="pepper"),
        "adapter": keys(2, adapter="poet"),
        "groups": keys(2),
    }
    if name == "picture":
        assert len(held[Tier.GPU]) == 2
        assert held[Tier.GPU] & keys(2) == keys(1)
    else:
        assert held[Tier.GPU] == expected[name]
    assert held[Tier.HOST] == (keys(2) if name == "host" else set())
    if name == "chain":
        assert frame.rank == 0


@pytest.mark.parametrize(("engine", "name", "payload"), FRAMES)
def test_a_frame_that_was_cut_is_refused_as_a_whole(engine: str, name: str, payload: bytes) -> None:
    adapter = catalogue.engine(engine)
    for end in range(len(payload)):
        with pytest.raises(MalformedFrame):
            adapter.decode(payload[:end])


@settings(max_examples=400, deadline=None)
@given(
    which=st.sampled_from(FRAMES),
    patches=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_frame_with_wrong_bytes_never_stops_the_reader(
    which: Any, patches: list[tuple[int, int]]
) -> None:
    engine, _, payload = which.values
    spoilt = bytearray(payload)
    for at, value in patches:
        spoilt[at % len(spoilt)] = value
    adapter = catalogue.engine(engine)
    try:
        frame = adapter.decode(bytes(spoilt))
    except MalformedFrame:
        return
    keymap = KeyMap(root, 16)
    keymap.take(frame, 0.0)
    told = {
        key
        for event in frame.events
        if isinstance(event, Stored) and event.tokens
        for key in event.ids
    }
    # Nothing is known but what some event of the frame told.
    assert len(keymap) <= len(told)
    held = keymap.contents()
    assert sum(map(len, held.values())) <= 3 * len(keymap)


@pytest.mark.parametrize("release", RELEASES)
def test_the_metrics_that_are_read_are_the_engines_own(release: str) -> None:
    told = RELEASES[release]
    engine = told["engine"]
    source = Path(catalogue.__file__).with_name(f"{engine}.py").read_text()
    read = set(re.findall(rf'"({engine}:[a-z_]+)"', source))
    # Counters are declared without the suffix that their samples have.
    declared = set(told["metrics"]) | {f"{name}_total" for name in told["metrics"]}
    old = {"vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "sglang:cache_config_info"}
    assert read - declared - old == set()
    assert declared & old or engine == "sglang"


VLLM_TEXT = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
USAGE{engine="0",model_name="m"} 0.25
USAGE{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2e+03
vllm:generation_tokens_total{engine="0",model_name="m"} 34.0
vllm:time_to_first_token_seconds_bucket{le="0.1"} 7
vllm:cache_config_info{block_size="784",cache_dtype="a \\"quoted\\" one",num_gpu_blocks="100"} 1.0
vllm:broken{
vllm:also_broken x
vllm:not_a_number NaN
"""


@pytest.mark.parametrize("usage", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])
def test_vllm_metrics_under_old_and_new_names(usage: str) -> None:
    vllm = catalogue.engine("vllm")
    answers = {"/metrics": VLLM_TEXT.replace("USAGE", usage).encode()}
    reading = vllm.read(answers, 784)
    assert reading is not None
    load = reading.load
    assert (load.running, load.waiting, load.blocks_total, load.blocks_used) == (5, 4, 100, 50)
    assert reading.work == 1234.0
    described = vllm.describe(answers, "h")
    assert (described.block_size, described.blocks_total) == (784, 100)
    assert vllm.recognises(answers)


def test_sglang_tells_its_streams_and_load() -> None:
    sglang = catalogue.engine("sglang")
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}
    events |= {"topic": "", "block_size": 64, "replay_endpoint_port_base": 5600}
    info = {"page_size": 64, "kv_events": events, "max_total_num_tokens": 6400, "version": "0.5.23"}
    text = b"sglang:num_running_reqs 2.0\nsglang:num_queue_reqs 1.0\nsglang:token_usage 0.5\n"
    text += b"sglang:max_total_num_tokens 6400\n"
    answers = {"/server_info": json.dumps(info).encode(), "/metrics": text}
    described = sglang.describe(answers, "gpu1")
    assert described.feed is not None
    assert described.feed.endpoints == ("tcp://gpu1:5557", "tcp://gpu1:5558")
    assert described.feed.replays == ("tcp://gpu1:5600", "tcp://gpu1:5601")
    assert (described.block_size, described.blocks_total) == (64, 100)
    reading = sglang.read(answers, 64)
    assert reading is not None
    assert (reading.load.running, reading.load.waiting, reading.load.blocks_used) == (2, 1, 50)
    assert sglang.recognises(answers)


def test_a_real_llamacpp_server_is_read() -> None:
    told = json.loads((FOLDER / "llamacpp.json").read_text())
    answers = {path: text.encode() for path, text in told["pages"].items()}
    llamacpp = catalogue.engine("llamacpp")
    assert catalogue.detect(answers) is llamacpp
    described = llamacpp.describe(answers, "h")
    assert (described.max_model_len, described.blocks_total) == (1024, 128)
    reading = llamacpp.read(answers, 16)
    assert isinstance(reading, Reading)
    assert (reading.load.running, reading.load.waiting) == (0, 0)
    assert reading.work is not None
    cold, warm = (llamacpp.usage(chat) for chat in told["chats"])
    assert cold is not None
    assert warm is not None
    assert cold.cached == 0
    assert warm.cached == warm.prompt - 1
    older = {**told["chats"][1], "usage": {"prompt_tokens": warm.prompt, "completion_tokens": 4}}
    assert llamacpp.usage(older) == warm
    assert llamacpp.usage(told["last_events"][-1]) is not None


def test_tgi_is_read_as_documented() -> None:
    told = json.loads((FOLDER / "tgi.json").read_text())
    assert "documentation" in told["origin"]
    answers = {path: text.encode() for path, text in told["pages"].items()}
    tgi = catalogue.engine("tgi")
    assert catalogue.detect(answers) is tgi
    assert tgi.reports is Reports.NEVER
    reading = tgi.read(answers, 16)
    assert reading is not None
    assert (reading.load.running, reading.load.waiting, reading.work) == (5, 3, 17.0)
    assert tgi.describe(answers, "h").max_model_len == 4096


@pytest.mark.parametrize("name", catalogue.ENGINES)
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"total_slots": {}}', b"\xff\xfe", b"[" * 9000, b"7", b'[{"id":1}]'],
)
def test_any_answer_of_a_peer_is_survived(name: str, body: bytes) -> None:
    engine = catalogue.engine(name)
    answers = dict.fromkeys({*engine.asks, *engine.polls}, body)
    engine.recognises(answers)
    engine.describe(answers, "h")
    engine.read(answers, 16)
    with pytest.raises(MalformedFrame):
        engine.decode(body)
    assert engine.usage({"usage": body.decode("latin-1")}) is None


def test_an_engine_is_told_by_its_answers_and_else_is_an_openai_server() -> None:
    assert catalogue.detect({}).name == "openai"
    assert catalogue.detect({"/version": b'{"version":"1"}'}).name == "openai"
    assert catalogue.detect({"/metrics": b"# x\nvllm:num_requests_running 1\n"}).name == "vllm"
    assert catalogue.detect({"/metrics": b"sglang:num_running_reqs 1\n"}).name == "sglang"
    assert catalogue.engine("unheard of").name == "openai"


def test_recalling_edits_only_the_request_of_vllm() -> None:
    vllm = catalogue.engine("vllm")
    from shared.jsonsplice import apply

    for raw, wanted in (
        (b'{"model":"m"}', {"kv_cache_report_mode": "full"}),
        (b'{"vllm_xargs":{"a":1},"model":"m"}', {"a": 1, "kv_cache_report_mode": "full"}),
        (b'{"vllm_xargs":null,"model":"m"}', {"kv_cache_report_mode": "full"}),
    ):
        edited = json.loads(apply(raw, vllm.edits(raw, recall=True)))
        assert edited == {"model": "m", "vllm_xargs": wanted}
        assert not vllm.edits(raw, recall=False)
    assert not catalogue.engine("sglang").edits(b"{}", recall=True)
