"""The manifests for Kubernetes fit each other and the code: selectors, ports, rights, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from promkit import scraped

from gateway.app import OPEN
from gateway.config import GatewayConfig, ListenConfig
from shared.settings import load

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
Object = dict[str, Any]


def manifests() -> list[Object]:
    found = [
        one
        for path in sorted(FOLDER.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
    ]
    assert all({"apiVersion", "kind", "metadata"} <= one.keys() for one in found)
    return found


ALL = manifests()
NAMED = {(one["kind"], one["metadata"]["name"]): one for one in ALL}


def pods() -> dict[str, Object]:
    """Templates of pods by the name of their deployment."""
    return {
        name: one["spec"]["template"] for (kind, name), one in NAMED.items() if kind == "Deployment"
    }


def selected(labels: dict[str, str]) -> list[Object]:
    return [pod for pod in pods().values() if labels.items() <= pod["metadata"]["labels"].items()]


def ports(pod: Object) -> dict[str, int]:
    named = [port for one in pod["spec"]["containers"] for port in one["ports"]]
    return {port["name"]: port["containerPort"] for port in named}


def test_no_object_is_there_twice_and_every_kind_has_its_group() -> None:
    assert len(NAMED) == len(ALL)
    groups = {
        "Deployment": "apps/v1",
        "PodDisruptionBudget": "policy/v1",
        "HorizontalPodAutoscaler": "autoscaling/v2",
        "NetworkPolicy": "networking.k8s.io/v1",
        "ServiceMonitor": "monitoring.coreos.com/v1",
        "Role": "rbac.authorization.k8s.io/v1",
        "RoleBinding": "rbac.authorization.k8s.io/v1",
    }
    kinds = {one["kind"] for one in ALL}
    assert kinds == groups.keys() | {"Service", "ServiceAccount", "ConfigMap"}
    for one in ALL:
        assert one["apiVersion"] == groups.get(one["kind"], "v1")


@pytest.mark.parametrize("name", pods())
def test_a_pod_is_whole(name: str) -> None:
    labels = NAMED["Deployment", name]["spec"]["selector"]["matchLabels"]
    assert selected(labels) == [pods()[name]]
    spec = pods()[name]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in ports(pods()[name])


def test_the_gateway_listens_and_is_probed_where_its_settings_say(tmp_path: Path) -> None:
    settings = tmp_path / "gateway.toml"
    settings.write_text(NAMED["ConfigMap", "headwater"]["data"]["gateway.toml"])
    pod = pods()["headwater"]
    [container] = pod["spec"]["containers"]
    env = {one["name"]: "from-a-secret" for one in container["env"]}
    config = load(GatewayConfig, file=settings, env=env, flags={})
    assert config.listen.admin_token == "from-a-secret"
    assert ports(pod) == {"http": config.listen.port, "admin": config.listen.admin_port}
    assert config.listen.port == ListenConfig().port
    paths = {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")}
    assert paths == OPEN
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + config.listen.drain_s
    assert (
        f"USER {pod['spec']['securityContext']['runAsUser']}:" in (ROOT / "Dockerfile").read_text()
    )
    [service] = config.discovery.kubernetes.services
    named = [port["name"] for port in NAMED["Service", service]["spec"]["ports"]]
    assert config.discovery.kubernetes.port in named


def test_services_lead_to_ports_of_pods() -> None:
    for (kind, name), one in NAMED.items():
        if kind == "Service":
            [pod] = selected(one["spec"]["selector"])
            for port in one["spec"]["ports"]:
                assert ports(pod)[port["targetPort"]] == port["port"], name


def test_the_gateways_rights_are_those_of_its_account() -> None:
    account = pods()["headwater"]["spec"]["serviceAccountName"]
    binding = NAMED["RoleBinding", "headwater"]
    assert [(one["kind"], one["name"]) for one in binding["subjects"]] == [
        ("ServiceAccount", account)
    ]
    assert ("ServiceAccount", account) in NAMED
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in NAMED


def test_budgets_and_network_rules_select_pods_and_their_ports() -> None:
    for (kind, _), one in NAMED.items():
        spec = one.get("spec", {})
        if kind == "PodDisruptionBudget":
            assert len(selected(spec["selector"]["matchLabels"])) == 1
            assert spec["maxUnavailable"] == 1
        if kind == "NetworkPolicy":
            [pod] = selected(spec["podSelector"]["matchLabels"])
            opened = [port["port"] for rule in spec["ingress"] for port in rule["ports"]]
            assert sorted(opened) == sorted(ports(pod))
            for rule in spec["ingress"]:
                for peer in rule["from"]:
                    if "podSelector" in peer:
                        assert selected(peer["podSelector"]["matchLabels"])


def test_autoscalers_follow_what_there_is() -> None:
    found = [one["spec"] for (kind, _), one in NAMED.items() if kind == "HorizontalPodAutoscaler"]
    assert len(found) == 2
    for spec in found:
        target = spec["scaleTargetRef"]
        assert (target["kind"], target["name"]) in NAMED
        assert 1 < spec["minReplicas"] < spec["maxReplicas"]
        for metric in spec["metrics"]:
            if metric["type"] == "External":
                assert metric["external"]["metric"]["name"] in scraped()
    kinds = {metric["type"] for spec in found for metric in spec["metrics"]}
    assert kinds == {"External", "Resource"}


def test_prometheus_finds_the_admin_service_and_its_token() -> None:
    spec = NAMED["ServiceMonitor", "headwater-gateway"]["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    [service] = [
        one
        for one in ALL
        if one["kind"] == "Service" and wanted <= one["metadata"].get("labels", {}).items()
    ]
    [endpoint] = spec["endpoints"]
    assert [port["name"] for port in service["spec"]["ports"]] == [endpoint["port"]]
    [secret] = [
        one["valueFrom"]["secretKeyRef"]
        for one in pods()["headwater"]["spec"]["containers"][0]["env"]
    ]
    assert endpoint["authorization"]["credentials"] == secret
    job = endpoint["relabelings"][0]["replacement"]
    assert f'job="{job}"' in (ROOT / "examples" / "monitoring" / "alerts.yaml").read_text()


def test_vllm_publishes_events_on_the_ports_that_are_open() -> None:
    arguments = pods()["vllm"]["spec"]["containers"][0]["args"]
    [told] = [one for one in arguments if one.startswith("--kv-events-config=")]
    events = json.loads(told.partition("=")[2])
    open_ports = ports(pods()["vllm"])
    assert events["endpoint"] == f"tcp://*:{open_ports['events']}"
    assert events["replay_endpoint"] == f"tcp://*:{open_ports['replay']}"
    workers = GatewayConfig().workers
    assert (workers.event_port, workers.replay_port) == (open_ports["events"], open_ports["replay"])
