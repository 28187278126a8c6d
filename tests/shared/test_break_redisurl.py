"""Redis addresses that cannot work are refused at the start, and no secret of them is shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gateway.config import GatewayConfig
from gateway.feeds import Feeds
from shared.errors import ConfigError
from shared.redisurl import Host, check, parse, shown
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
    "redis+sentinel://:CANARY@host:1",
    "redis+sentinel://:CANARY@host:1/?x=CANARY",
    "redis+sentinel://:CANARY@host:port/main",
    "redis+sentinel://:CANARY@/main",
    "redis+sentinel://:CANARY@a:1,,b:2/main",
    "redis+cluster://:CANARY@a:1,b:0",
    "redis+cluster://:CANARY@a:1,b:2/1",
    "redis+cluster://:CANARY@a:1,b:2?nonsense=CANARY",
    "redis+magic://:CANARY@a:1",
    "http+cluster://:CANARY@a:1",
    "unix+cluster:///x",
]
GOOD = [
    "redis://127.0.0.1:6379/0",
    "rediss://u:p%40@host:1/2?ssl_cert_reqs=none",
    "unix:///tmp/redis.sock?db=1",
    "redis://host?health_check_interval=3",
    "redis+cluster://a:1,b:2,[::1]:3",
    "rediss+cluster://u:p@a,b?ssl_ca_certs=/x",
    "redis+sentinel://:p@a:1,b/main/3?sentinel_username=u&sentinel_password=p%2F",
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
    router = SimpleNamespace(apply_events=None)  # nobody is met before the address is read
    with pytest.raises(ConfigError):
        Feeds(router, config, gateway_id="g")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        check_redis(BAD[0])


def test_what_is_read() -> None:
    sentinel = parse("redis+sentinel://u:p%40@a:1,b/main/3?sentinel_password=q%2F")
    assert [str(host) for host in sentinel.hosts] == ["a:1", "b:26379"]
    assert sentinel.master == "main"
    assert (sentinel.options["username"], sentinel.options["password"]) == ("u", "p@")
    assert sentinel.options["db"] == 3
    assert sentinel.sentinel_options["password"] == "q/"
    assert "username" not in sentinel.sentinel_options
    assert "q/" not in repr(sentinel)
    cluster = parse("redis+cluster://a,[::1]:7")
    assert cluster.hosts == (Host("a", 6379), Host("::1", 7))
    late = parse("redis://h?socket_timeout=60").connection(None, 1.0)
    assert late.socket_timeout is None


def test_what_is_shown() -> None:
    assert shown("redis://u:p@h:1/0?password=x") == "redis://***@h:1/0"
    assert shown("redis://u:a@b@h") == "redis://***@h"
    assert shown("unix:///a/b.sock") == "unix:///a/b.sock"
