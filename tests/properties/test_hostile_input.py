"""Whatever is read from outside, garbled in any way, is either understood or refused as documented.

One strategy garbles good examples: pieces are cut, doubled, moved, or replaced by bytes that mean
something to the reader. Bodies of requests, configuration files, ledger lines, event batches.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from depth import DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgerkit import hit, record

from gateway.config import GatewayConfig, TenancyConfig
from gateway.discovery.file import parse as parse_list
from gateway.keysfile import read_keys
from gateway.ledgerline import Dropped, decode_record, encode_dropped, encode_record
from gateway.lint.read import LintError, read_prompts
from gateway.openers import check_config
from gateway.records import RequestRecord
from shared import dialogue, openai
from shared.errors import BadRequest, ConfigError
from shared.events import EventBatch, decode_batch, encode_batch, removed, stored
from shared.jsonsplice import apply, set_member
from shared.openai import RouteKind
from shared.settings import load
from shared.types import Epoch, WorkerId
from worker.config import WorkerConfig

ODD = [
    *(b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f", b"\\ud800", b"\\u0000", b"\r\n", b"\n"),
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b"18446744073709551616", b"0.5", b'""', b"[]"),
    *(b"{}", b"[" * 3000, b'{"a":' * 3000, b",", b":", b'"', b"'", b"=", b"#", b"{", b"}", b"]"),
    *(b"inf", b"1979-05-27", b"0x10", b'"""', b"[[", b"]]", b"9" * 400, b"\xc1", b"\xdf" * 9),
]


T = TypeVar("T")
few = settings(deadline=None, max_examples=40 * DEPTH)


def tried(read: Callable[[], T], *expected: type[Exception]) -> tuple[T | None, str]:
    """What is read, or the message of an error that may come."""
    try:
        return read(), ""
    except expected as error:
        return None, str(error) or type(error).__name__


@st.composite
def garbled(draw: st.DrawFn, examples: list[bytes]) -> bytes:
    """One of the examples after up to four injuries, or noise."""
    data = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from("cut replace double insert end other".split()))
        if kind == "cut":
            data = data[:at] + data[to:]
        elif kind == "replace":
            data = data[:at] + draw(st.sampled_from(ODD)) + data[to:]
        elif kind == "double":
            data = data[:to] + data[at:]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(max_size=4) | st.sampled_from(ODD)) + data[at:]
        elif kind == "end":
            data = data[:at]
        else:
            other = draw(st.sampled_from(examples))
            data = data[:at] + other[draw(st.integers(0, len(other))) :]
    return data


BODIES = [
    json.dumps(one).encode()
    for one in (
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a\u2028\U0001f30d"}]},
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "cache_salt": "s",
            "session_id": "x",
        },
        {"model": "m", "prompt": [[1, 2, 3], [4]], "n": 2, "max_tokens": None},
        {
            "model": "m",
            "prompt": ["a", "b"],
            "logit_bias": {"1": -100},
            "unknown": 12345678901234567,
        },
    )
]


@few
@given(garbled(BODIES), st.sampled_from(list(RouteKind)))
def test_bodies_of_requests(body: bytes, kind: RouteKind) -> None:
    for route in dialogue.ROUTES:  # never an error
        dialogue.read(route, body)
    request, why = tried(lambda: openai.parse(kind, body), BadRequest)
    assert len(why) < 1000
    if request is None:
        return
    assert request.raw == body
    # What was understood can be spliced, and nothing but the member changes.
    changed = apply(body, set_member(body, "cache_salt", b'"new"'))
    before, after = msgspec.json.decode(body), msgspec.json.decode(changed)
    assert after == {**before, "cache_salt": "new"}
    assert openai.parse(kind, changed).cache_salt == "new"


GATEWAY_FILES = [
    b'[listen]\nport = 9000\napi_keys = ["a", "b"]\n[routing]\npolicy = "cost"\nretries = 1\n'
    b"[routing.options.cost]\nkappa = 2.5\n[admission]\nqueue = 4\n",
    b'[workers]\nurls = ["http://a:1", "http://[::1]:2"]\n[[workers.static]]\nurl = "http://c:3"\n'
    b'engine = "vllm"\nranks = 2\n[discovery.dns]\nurls = ["http://x:1"]\n[redis]\nurl = "none"\n',
    b'[tenancy]\nisolation = "auto"\nconcurrent = 3\n[ledger]\ndir = "/x"\ntrace = true\n'
    b'[log]\nlevel = "debug"\n[telemetry]\nsample = 0.5\n[deployment]\nname = "d"\n',
]
WORKER_FILES = [
    b'[model]\npath = "fake"\nserved_names = ["m"]\ndtype = "float32"\n[cache]\nkv_blocks = 10\n'
    b"[schedule]\nmax_batch_tokens = 64\n[serve]\nport = 1\n",
]
KEY_FILES = [
    b'[[keys]]\nsha256 = "' + b"ab" * 32 + b'"\ntenant = "x"\n[[keys]]\nkey = "CANARY"\n'
    b'tenant = "y"\n[tenants.x]\nrequests_per_minute = 5\ngroup = "g"\n'
    b"[tenants.y]\nshared = true\n",
]


def in_a_file(data: bytes, read: Callable[[Path], T]) -> T | None:
    """What is read; None after an error of one line, which shows no key."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.toml"
        path.write_bytes(data)
        found, why = tried(lambda: read(path), ConfigError)
    assert "\n" not in why
    assert "CANARY" not in why
    return found


@few
@given(garbled(GATEWAY_FILES))
def test_files_of_the_gateway(data: bytes) -> None:
    config = in_a_file(data, lambda path: load(GatewayConfig, file=path, env={}, flags={}))
    if config is not None:
        in_a_file(b"", lambda _: check_config(config))


@few
@given(garbled(WORKER_FILES))
def test_files_of_the_worker(data: bytes) -> None:
    config = in_a_file(data, lambda path: load(WorkerConfig, file=path, env={}, flags={}))
    assert config is None or isinstance(config, WorkerConfig)


NAMES = "LISTEN__PORT LISTEN__API_KEYS ROUTING__OPTIONS WORKERS__STATIC LISTEN__HEADERS".split()
VALUES = st.text(max_size=30) | st.sampled_from([odd.decode("utf-8", "replace") for odd in ODD])


@few
@given(st.sampled_from(NAMES), VALUES)
def test_environments(name: str, value: str) -> None:
    env = {f"HEADWATER_{name}": value}
    _, why = tried(lambda: load(GatewayConfig, file=None, env=env, flags={}), ConfigError)
    assert "\n" not in why


@few
@given(garbled(KEY_FILES))
def test_files_of_keys(data: bytes) -> None:
    found = in_a_file(data, lambda path: read_keys(TenancyConfig(keys_file=str(path))))
    for code, tenant in (found or {}).items():
        assert len(code) == 32
        assert tenant.name


LISTS = [b'{"workers":["http://a:1",{"url":"http://b:2","drain":true}]}',
         b'workers = ["http://a:1", {url = "https://b", drain = true}]']  # fmt: skip


@few
@given(garbled(LISTS), st.sampled_from([".json", ".toml"]))
def test_lists_of_workers(data: bytes, suffix: str) -> None:
    try:
        listing = parse_list(data, suffix)
    except ConfigError:
        return
    assert all(url.startswith(("http://", "https://")) for url in listing.workers)


LINES = [
    encode_dropped(1.5, 7),
    encode_record(record(flow=hit(100, 48, 4)), b"salt"),
    encode_record(record(flow=hit(7, 0), path=(1, 2, 1 << 63)), b""),
]


@few
@given(garbled(LINES))
def test_ledger_lines(line: bytes) -> None:
    try:
        found = decode_record(line)
    except (msgspec.DecodeError, RecursionError):
        return
    if isinstance(found, Dropped):
        return
    again = decode_record(encode_record(found))
    assert isinstance(again, RequestRecord)
    assert again.flow == found.flow
    assert again.outcome == found.outcome


BATCHES = [
    encode_batch(
        EventBatch(WorkerId("w"), Epoch(3), "s", 1, 2.0, 1, (stored([1, 2], 7), removed([1])))
    ),
    encode_batch(EventBatch(WorkerId("w"), Epoch(3), "s", 9, 2.0, 2, ())),
]


@few
@given(garbled(BATCHES))
def test_event_batches(data: bytes) -> None:
    try:
        batch = decode_batch(data)
    except (msgspec.DecodeError, RecursionError):
        return
    assert decode_batch(encode_batch(batch)) == batch


@few
@given(st.lists(garbled(BODIES), max_size=3))
def test_files_of_prompts(lines: list[bytes]) -> None:
    _, why = tried(lambda: list(read_prompts(lines)), LintError)
    assert not why or why.startswith("line ")
