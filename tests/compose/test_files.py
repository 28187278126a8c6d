"""Every compose file under every profile: valid, hardened, pinned, one GPU each."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from composekit import ROOT, Project

from gateway.config import GatewayConfig
from shared.layers import load
from worker.config import WorkerConfig

pytestmark = [pytest.mark.compose, pytest.mark.timeout(120)]

GPU_FILES = {"gpu": "worker-gpu", "vllm": "vllm", "sglang": "sglang"}
GPUS = {"gpu1": 1, "gpu2": 2, "gpu4": 4, "gpu8": 8}
PLAIN = [
    ((), profile, services)
    for profile, services in {
        "cpu": {"worker"},
        "fake": {"worker-fake"},
        "cpu,monitoring": {"worker", "prometheus", "grafana"},
        "fake,monitoring": {"worker-fake", "prometheus", "grafana"},
    }.items()
]
ON_GPUS = [
    (("compose.yaml", f"compose.{kind}.yaml"), profile, {f"{name}-{i}" for i in range(number)})
    for kind, name in GPU_FILES.items()
    for profile, number in GPUS.items()
]
EVERY = [
    *PLAIN,
    *ON_GPUS,
    (("examples/vllm-two-workers/compose.yaml",), "", {"vllm-1", "vllm-2"}),
]


@functools.cache
def model(files: tuple[str, ...], profile: str) -> dict[str, Any]:
    return Project(profile, files).config()


@pytest.mark.parametrize(("files", "profile", "services"), EVERY)
def test_a_combination_is_valid_and_starts_what_it_says(
    files: tuple[str, ...], profile: str, services: set[str]
) -> None:
    found = model(files, profile)["services"]
    base = {"gateway"} if "examples" in "".join(files) else {"gateway", "redis"}
    assert found.keys() == base | services
    for name, one in found.items():
        image = one.get("image", "built here")
        tag = image.rpartition("/")[2].partition(":")[2]
        assert tag != "latest"
        assert tag or "build" in one, f"{name}: {image} is not pinned"


@pytest.mark.parametrize(("files", "profile"), [(a, b) for a, b, _ in PLAIN + ON_GPUS])
def test_services_have_few_rights_and_limits(files: tuple[str, ...], profile: str) -> None:
    ours = {"gateway", "redis", "worker", "worker-fake", *(f"worker-gpu-{i}" for i in range(8))}
    for name, one in model(files, profile)["services"].items():
        assert one["restart"] == "unless-stopped", name
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert not one.get("privileged"), name
        assert one["logging"]["options"]["max-size"], name
        if name in ours:
            assert one["read_only"] is True, name
            limits = one["deploy"]["resources"]["limits"]
            assert int(limits["memory"]) >= 2**30, name
            assert limits["pids"] >= 64, name
        # nothing but the gateway and the monitoring is reached from outside, and that from here
        for port in one.get("ports", []):
            assert name in {"gateway", "prometheus", "grafana"}
            assert port["host_ip"] == "127.0.0.1"


@pytest.mark.parametrize(("files", "profile"), [(a, b) for a, b, _ in PLAIN + ON_GPUS])
def test_gateways_wait_for_redis_and_what_serves_says_when_it_is_ready(
    files: tuple[str, ...], profile: str
) -> None:
    services = model(files, profile)["services"]
    for name, one in services.items():
        for condition in one.get("depends_on", {}).values():
            assert condition["condition"] == "service_healthy"
        if name not in {"prometheus", "grafana"}:
            assert one["healthcheck"]["test"], name
    assert "redis" in services["gateway"]["depends_on"]


@pytest.mark.parametrize(("files", "profile", "services"), ON_GPUS)
def test_each_of_them_has_a_gpu_of_its_own(
    files: tuple[str, ...], profile: str, services: set[str]
) -> None:
    found = model(files, profile)["services"]
    devices = [
        device["device_ids"]
        for name in sorted(services)
        for device in found[name]["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert devices == [[str(number)] for number in range(GPUS[profile])]
    for name in services:
        assert found[name]["deploy"].get("replicas", 1) == 1


@pytest.mark.parametrize(("files", "profile"), [(a, b) for a, b, _ in PLAIN + ON_GPUS])
def test_the_settings_in_the_environment_exist(files: tuple[str, ...], profile: str) -> None:
    for name, one in model(files, profile)["services"].items():
        ours = {k: v for k, v in one.get("environment", {}).items() if k.startswith("HEADWATER_")}
        if name == "gateway":
            load(GatewayConfig, file=None, env=ours, flags={})
        elif name.startswith("worker"):
            load(WorkerConfig, file=None, env=ours, flags={})
        else:
            assert not ours


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_are_found_by_name_and_followed_where_they_publish(kind: str) -> None:
    services = model(("compose.yaml", f"compose.{kind}.yaml"), "gpu2")["services"]
    config = load(GatewayConfig, file=None, env=services["gateway"]["environment"], flags={})
    [url] = config.discovery.dns.urls
    assert config.workers.engine == kind
    for name in (f"{kind}-0", f"{kind}-1"):
        one = services[name]
        assert url.removeprefix("http://").split(":")[0] in one["networks"]["default"]["aliases"]
        assert f":{url.rsplit(':', 1)[1]}/health" in one["healthcheck"]["test"][-1]
        [told] = [arg for arg in one["command"] if arg.startswith("--kv-events-config=")]
        events = json.loads(told.partition("=")[2])
        assert events["endpoint"] == f"tcp://*:{config.workers.event_port}"
        assert events["replay_endpoint"] == f"tcp://*:{config.workers.replay_port}"
        served = [arg.partition("=")[2] for arg in one["command"] if arg.startswith("--model")]
        assert served == list(config.render.tokenizers)


def test_what_is_pinned_by_tag_can_be_pinned_by_digest() -> None:
    digest = "@sha256:" + "0" * 64
    names = {
        "REDIS_IMAGE": ("redis", "redis:7"),
        "PROMETHEUS_IMAGE": ("prometheus", "prom/prometheus:v3.5.0"),
        "GRAFANA_IMAGE": ("grafana", "grafana/grafana:12.1.1"),
    }
    pinned = {key: tag + digest for key, (_, tag) in names.items()}
    project = Project("cpu,monitoring", (), {**pinned, "PYTHON_IMAGE": f"python:3.11-slim{digest}"})
    services = project.config()["services"]
    assert {services[name]["image"] for name, _ in names.values()} == set(pinned.values())
    for name in ("gateway", "worker"):
        assert services[name]["build"]["args"]["PYTHON_IMAGE"].endswith(digest)
    assert (ROOT / "Dockerfile").read_text().count("FROM ${PYTHON_IMAGE} AS ") == 2
