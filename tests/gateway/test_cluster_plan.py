"""Which processes ``headwater up`` starts, and how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.cli.up import up
from gateway.cluster.child import ChildSpec
from gateway.cluster.plan import (
    ClusterOptions,
    gateway_ports,
    gateway_specs,
    worker_specs,
    worker_urls,
)
from shared.errors import ConfigError

OPTIONS = ClusterOptions(
    workers=3, gateways=2, port=9000, model="some/dir", policy="random", fake=False, threads=4
)
SECRET = "redis://user:hunter2@10.0.0.1:6379/0"


def all_specs() -> list[ChildSpec]:
    folder = Path("x")
    return [
        *worker_specs(OPTIONS, SECRET, folder),
        *gateway_specs(OPTIONS, SECRET, folder, folder),
    ]


def test_ports_as_documented() -> None:
    assert gateway_ports(OPTIONS) == [(9000, 9001), (9010, 9011)]
    assert worker_urls(OPTIONS) == [f"http://127.0.0.1:{8100 + i}" for i in range(3)]


def test_a_password_in_the_redis_url_shows_in_no_command_line() -> None:
    for spec in all_specs():
        assert "hunter2" not in " ".join(spec.argv)
        assert spec.env["HEADWATER_REDIS__URL"] == SECRET


def test_children_start_isolated_from_the_current_folder() -> None:
    assert all(spec.argv[1:3] == ("-P", "-m") for spec in all_specs())


def test_each_worker_gets_its_model_and_its_share_of_the_cores() -> None:
    for spec in worker_specs(OPTIONS, "none", Path("x")):
        assert spec.argv[spec.argv.index("--model") + 1] == "some/dir"
        assert spec.argv[spec.argv.index("--threads") + 1] == "4"
        assert spec.env["GOMP_SPINCOUNT"] == "0"


def test_workers_are_bound_to_cores_of_their_own_on_request() -> None:
    def pins(options: ClusterOptions) -> list[str]:
        argvs = [spec.argv for spec in worker_specs(options, "none", Path("x"))]
        return [argv[argv.index("--pin") + 1] for argv in argvs if "--pin" in argv]

    assert pins(OPTIONS) == []
    bound = replace(OPTIONS, threads=2, cores=(1, 2, 3, 5, 6, 7, 9))
    assert pins(bound) == ["1,2", "3,5", "6,7"]


def test_more_bound_workers_than_cores_are_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"--pin.*100000 workers"):
        up(workers=100_000, pin=True)


def test_the_policy_reaches_every_gateway() -> None:
    for spec in gateway_specs(OPTIONS, "none", Path("x"), Path("y")):
        assert spec.argv[spec.argv.index("--policy") + 1] == "random"
        assert spec.env["HEADWATER_LEDGER__DIR"] == "y"
