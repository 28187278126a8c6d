"""Which processes a local cluster consists of, and on which ports. Starts nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gateway.cluster.child import ChildSpec

FIRST_WORKER_PORT = 8100
GATEWAY_PORT_STEP = 10


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the user asked ``headwater up`` for."""

    workers: int
    gateways: int
    port: int
    model: str
    policy: str | None
    fake: bool
    threads: int
    """CPU threads per worker."""
    cores: tuple[int, ...] = ()
    """Cores that workers are bound to, each to its own; none: the system places their threads."""
    worker_flags: tuple[str, ...] = ()
    """Handed to each worker as they are."""
    worker_port: int = FIRST_WORKER_PORT


def worker_urls(options: ClusterOptions) -> list[str]:
    """Base URLs of the workers."""
    return [f"http://127.0.0.1:{options.worker_port + i}" for i in range(options.workers)]


def gateway_ports(options: ClusterOptions) -> list[tuple[int, int]]:
    """(public, admin) port of each gateway."""
    first = options.port
    return [
        (first + i * GATEWAY_PORT_STEP, first + i * GATEWAY_PORT_STEP + 1)
        for i in range(options.gateways)
    ]


def redis_setting(url: str) -> dict[str, str]:
    """The URL for a child, by its environment: it may hold a password, and flags show in ``ps``."""
    return {"HEADWATER_REDIS__URL": url}


def own_cores(options: ClusterOptions, index: int) -> tuple[str, ...]:
    """Flags that bind worker ``index`` to its share of the cores, if that was asked for."""
    if not options.cores:
        return ()
    first = index * options.threads
    own = options.cores[first : first + options.threads]
    return ("--pin", ",".join(map(str, own)))


def worker_specs(options: ClusterOptions, redis_url: str, logs: Path) -> list[ChildSpec]:
    """One child per worker, with its share of the cores."""
    specs = []
    for index in range(options.workers):
        flags = ["--port", str(options.worker_port + index)]
        model = "fake" if options.fake else options.model
        flags += ["--model", model, "--threads", str(options.threads)]
        flags += [*own_cores(options, index), *options.worker_flags]
        # several workers share the cores: threads that spin while they wait for each other would
        # halve everybody's speed
        env = {"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(options.threads)}
        env |= redis_setting(redis_url)
        argv = (sys.executable, "-P", "-m", "worker", *flags)
        specs.append(ChildSpec(f"worker {index}", argv, logs / f"worker-{index}.log", env))
    return specs


def gateway_specs(
    options: ClusterOptions, redis_url: str, logs: Path, ledger: Path
) -> list[ChildSpec]:
    """One child per gateway; the workers are named to it, so that it finds them without Redis."""
    specs = []
    for index, (port, admin_port) in enumerate(gateway_ports(options)):
        flags = ["--port", str(port), "--admin-port", str(admin_port)]
        flags += ["--workers", ",".join(worker_urls(options))]
        if options.policy is not None:
            flags += ["--policy", options.policy]
        env = {"HEADWATER_LEDGER__DIR": str(ledger), **redis_setting(redis_url)}
        argv = (sys.executable, "-P", "-m", "gateway", *flags)
        specs.append(ChildSpec(f"gateway {index}", argv, logs / f"gateway-{index}.log", env))
    return specs
