"""The ledger's Redis stream: what all gateways put in comes out once, and outages are counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from ledgerkit import headwater, hit, record

from gateway import ledgerstream
from gateway.config import GatewayConfig, LedgerConfig
from gateway.ledgerline import Dropped, decode_record
from gateway.ledgerstream import LedgerStream, read_stream
from gateway.openers import check_config
from gateway.records import RequestRecord
from shared.errors import ConfigError
from shared.rediskeys import RedisKeys
from shared.redislink import RedisLost
from shared.settings import RedisConfig


def until(check: Callable[[], Any], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def read(url: str) -> list[RequestRecord | Dropped]:
    return [decode_record(line) for line in read_stream(url, "headwater")]


@pytest.mark.redis
def test_two_gateways_share_a_stream_that_report_reads(
    redis_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = [
        LedgerStream(redis_server.url, "headwater", b"s3cret", 10_000, flush_s=0.01)
        for _ in range(2)
    ]
    for number in range(600):
        one = record(request_id=f"r{number}", family="0badcafe", flow=hit(100, 64))
        sinks[number % 2].record(one)
    for sink in sinks:
        sink.close()
        sink.close()
    assert headwater("report", redis_server.url, "--format", "json", "--by", "family") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["totals"]["requests"], report["totals"]["delivered"]) == (600, 600 * 64)
    (group,) = report["groups"]
    assert group["key"]["family"] not in ("", "0badcafe")


@pytest.mark.redis
def test_the_stream_is_bounded_and_every_line_comes_once(redis_server: Any) -> None:
    import redis

    sink = LedgerStream(redis_server.url, "headwater", b"s", 300, flush_s=3600)
    for number in range(2000):
        sink.record(record(request_id=f"r{number}"))
    sink.close()
    client = redis.Redis.from_url(redis_server.url)
    key = RedisKeys("headwater").ledger()
    assert 300 <= int(client.xlen(key)) <= 500  # type: ignore[arg-type]  # the library's async half
    assert client.pttl(key) > 0  # type: ignore[operator]
    last = client.xrevrange(key, count=1)[0][1]  # type: ignore[index]
    client.xadd(key, last)  # an addition whose answer was lost is made again
    found = read(redis_server.url)
    names = [each.request_id for each in found if isinstance(each, RequestRecord)]
    assert len(names) == len(set(names))
    assert names[-1] == "r1999"
    client.close()


@pytest.mark.redis
def test_an_outage_loses_only_what_is_counted(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgerstream, "WAITING_LINES", 50)
    monkeypatch.setattr(ledgerstream, "PAUSE_S", 0.01)
    sink = LedgerStream(redis_server.url, "headwater", b"s", 10_000, timeout_s=0.2, flush_s=0.01)
    sink.record(record(request_id="before"))
    until(lambda: len(read(redis_server.url)) == 1)
    redis_server.stop()
    for number in range(120):
        sink.record(record(request_id=f"r{number}"))
    until(lambda: sink.dropped == 70)
    redis_server.start()
    until(lambda: len(read(redis_server.url)) >= 51)
    sink.close()
    found = read(redis_server.url)
    assert sum(each.dropped for each in found if isinstance(each, Dropped)) == 70
    names = [each.request_id for each in found if isinstance(each, RequestRecord)]
    assert names[-50:] == [f"r{number}" for number in range(70, 120)]


def test_without_redis_nothing_blocks_and_closing_is_quick() -> None:
    sink = LedgerStream("redis://127.0.0.1:1/0", "headwater", b"s", 10, timeout_s=0.2)
    begun = time.monotonic()
    for _ in range(5000):
        sink.record(record())
    sink.close()
    assert time.monotonic() - begun < 10
    with pytest.raises(RedisLost):
        list(read_stream("redis://127.0.0.1:1/0", "headwater", timeout_s=0.2))


def test_what_cannot_work_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = LedgerConfig(stream_records=5)
    with pytest.raises(ConfigError, match=r"ledger\.stream_records: .*needs Redis"):
        check_config(GatewayConfig(ledger=ledger))
    with_redis = RedisConfig(url="redis://127.0.0.1:6379/0")
    with pytest.raises(ConfigError, match=r"needs \[deployment\] secret"):
        check_config(GatewayConfig(ledger=ledger, redis=with_redis))
    assert headwater("report", "redis://:hidden@127.0.0.1:1/0") == 2
    told = capsys.readouterr().err
    assert "cannot be read" in told
    assert "hidden" not in told
