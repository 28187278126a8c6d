"""Redis addresses that cannot work are refused at the start, and no secret of them is shown."""

from __future__ import annotations

import pytest

from gateway.config import GatewayConfig
from gateway.feeds import Feeds
from shared.errors import ConfigError
from shared.redisurl import check, shown
from shared.settings import load
from worker.build import check_redis

BAD = [
    "redis://user:CANARY@127.0.0.1:1/0?x=CANARY",
    "redis://:CANARY/x@host",
    "redis://:CANARY#x@host:1/0",
    "redis://:CANARY?x@host",
    "redis://:CANARY@host:99999",
    "redis://:CANARY@[::1",
    "redis://:CANARY@host?db=CANARY",
    "redis://host?password=CANARY&socket_timeout=zz",
    "redis://:CANARY@host?protocol=9",
    "http://:CANARY@host",
    "CANARY@host",
    ":CANARY@host:6379",
    "",
]
GOOD = [
    "redis://127.0.0.1:6379/0",
    "rediss://u:p%40@host:1/2?ssl_cert_reqs=none",
    "unix:///tmp/redis.sock?db=1",
    "redis://host?health_check_interval=3",
]


@pytest.mark.parametrize("url", BAD)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(url)
    assert caught.value.key == "redis.url"
    assert "CANARY" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", GOOD)
def test_good_addresses(url: str) -> None:
    check(url)


def test_both_processes_check_it() -> None:
    config = load(GatewayConfig, file=None, env={}, flags={"redis.url": BAD[0]})
    with pytest.raises(ConfigError):
        Feeds(None, config, gateway_id="g")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        check_redis(BAD[0])


def test_what_is_shown() -> None:
    assert shown("redis://u:p@h:1/0?password=x") == "redis://***@h:1/0"
    assert shown("redis://u:a@b@h") == "redis://***@h"
    assert shown("unix:///a/b.sock") == "unix:///a/b.sock"
