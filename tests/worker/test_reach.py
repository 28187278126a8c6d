"""An address that nobody can reach is told, with what to do."""

from __future__ import annotations

import pytest

from worker.reach import unreachable

HERE = ["redis://127.0.0.1:6379/0", "redis://localhost", "unix:///tmp/r.sock", "redis://[::1]:1"]
THERE = ["redis://10.0.0.9:6379/0", "rediss://redis.example:6379", "redis+cluster://a:1,b:2"]
LOOPBACK = [
    "http://127.0.0.1:8100",
    "http://localhost:8100",
    "http://[::1]:8100",
    "http://127.9.9.9:1",
]


@pytest.mark.parametrize("redis", THERE)
@pytest.mark.parametrize("url", LOOPBACK)
def test_a_loopback_address_in_a_redis_elsewhere_is_of_no_use(url: str, redis: str) -> None:
    assert "ADVERTISE_URL" in unreachable(url, redis)
    assert "--host 0.0.0.0" in unreachable(url, redis)


@pytest.mark.parametrize("redis", HERE)
@pytest.mark.parametrize("url", LOOPBACK)
def test_with_a_redis_on_this_machine_it_is_fine(url: str, redis: str) -> None:
    assert unreachable(url, redis) == ""


@pytest.mark.parametrize("redis", [*HERE, *THERE])
@pytest.mark.parametrize("url", ["http://gpu1:8100", "http://10.0.0.1:8100", "https://[fd00::1]:1"])
def test_any_other_address_is_fine(url: str, redis: str) -> None:
    assert unreachable(url, redis) == ""
