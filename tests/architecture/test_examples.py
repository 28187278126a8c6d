"""What stands in ``examples/`` works with the code as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from gateway.config import GatewayConfig
from gateway.discovery.static import static_listing
from shared.settings import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("engine", ["vllm-two-workers", "sglang", "llamacpp"])
def test_the_examples_of_engines_are_valid(engine: str) -> None:
    config = load(GatewayConfig, file=EXAMPLES / engine / "gateway.toml", env={}, flags={})
    urls = static_listing(config.workers).workers
    assert len(urls) == 2
    named = {one.engine for one in config.workers.static} or {config.workers.engine}
    assert named == {engine.split("-", maxsplit=1)[0]}
    if engine == "vllm-two-workers":
        composed = (EXAMPLES / engine / "compose.yaml").read_text()
        for one in config.workers.static:
            host = one.url.split("/")[2].split(":")[0]
            assert f"\n  {host}:\n" in composed
            assert host in one.events
        told = re.search(r"--kv-events-config=(\{.*\})'", composed)
        assert told is not None
        assert json.loads(told[1])["replay_endpoint"].endswith(":5558")


def test_the_example_configuration_is_valid() -> None:
    config = load(GatewayConfig, file=EXAMPLES / "gateway.toml", env={}, flags={})
    assert len(config.workers.urls) == 2
    assert config.redis.url.startswith("redis://")


def test_the_manifest_for_kubernetes_holds_a_valid_configuration(tmp_path: Path) -> None:
    from gateway.discovery.kubernetes import api_url

    text = (EXAMPLES / "kubernetes" / "gateway.yaml").read_text()
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    settings = tmp_path / "gateway.toml"
    settings.write_text(objects["ConfigMap"]["data"]["gateway.toml"])
    config = load(GatewayConfig, file=settings, env={}, flags={})
    kube = config.discovery.kubernetes
    assert (kube.services, kube.port) == (("vllm",), "http")
    assert api_url(kube, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) == "https://10.96.0.1:443"
    [rule] = objects["Role"]["rules"]
    assert (rule["resources"], rule["verbs"]) == (["endpointslices"], ["list", "watch"])
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config.listen.drain_s
