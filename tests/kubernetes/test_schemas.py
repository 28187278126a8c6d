"""The manifests and the chart against the schemas of Kubernetes; the chart rendered by Helm.

`make test-kubernetes` fetches both tools. What the chart renders by default is what the plain
manifests say, so that there is one truth.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig
from shared.layers import load

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
CHART = FOLDER / "chart"
VERSIONS = ("1.25", "1.31", "1.35")
CUSTOM = {"ServiceMonitor"}
"""Kinds of operators, of which Kubernetes has no schema."""
EVERYTHING = (
    *("autoscaling.enabled=true", "engineAutoscaling.enabled=true", "serviceMonitor.enabled=true"),
    *("networkPolicy.enabled=true", "modelsClaim=models", "image.digest=sha256:" + "0" * 64),
    *("discovery.services={a,b}", r"settings.render.tokenizers.Qwen/Qwen3-8B=/models/Qwen3-8B"),
)
Object = dict[str, Any]


@pytest.fixture(scope="module")
def tools() -> Path:
    return Path(os.environ["HEADWATER_KUBERNETES_TOOLS"])


def rendered(tools: Path, *settings: str) -> str:
    told = [part for one in settings for part in ("--set", one)]
    done = subprocess.run(
        [tools / "helm", "template", "headwater", CHART, "--namespace", "llm", *told],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> dict[tuple[str, str], Object]:
    found = [one for one in yaml.safe_load_all(text) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


def validated(tools: Path, file: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [
        tools / "env/bin/kubernetes-validate",
        "--strict",
        "--kubernetes-version",
        version,
        file,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check(tools: Path, tmp_path: Path, text: str, version: str) -> None:
    known = [one for (kind, _), one in objects(text).items() if kind not in CUSTOM]
    assert known
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(known))
    done = validated(tools, file, version)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["autoscaling", "gateway", "network", "vllm"])
def test_manifests_fit_the_schemas(name: str, version: str, tools: Path, tmp_path: Path) -> None:
    check(tools, tmp_path, (FOLDER / f"{name}.yaml").read_text(), version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("settings", [(), EVERYTHING], ids=["default", "everything"])
def test_the_chart_fits_the_schemas(
    settings: tuple[str, ...], version: str, tools: Path, tmp_path: Path
) -> None:
    check(tools, tmp_path, rendered(tools, *settings), version)


def test_what_does_not_fit_is_noticed(tools: Path, tmp_path: Path) -> None:
    text = (FOLDER / "gateway.yaml").read_text()
    for right, wrong in (
        ("containerPort: 8000", "containerPort: http"),
        ("failureThreshold: 6", "failureTreshold: 6"),
        ("maxSurge: 1", "maxSurges: 1"),
    ):
        assert right in text
        with pytest.raises(AssertionError):
            check(tools, tmp_path, text.replace(right, wrong, 1), VERSIONS[-1])


def test_helm_finds_nothing_wrong(tools: Path) -> None:
    done = subprocess.run(
        [tools / "helm", "lint", "--strict", CHART], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def stripped(one: Any) -> Any:
    """Without what only Helm says, and without the settings, which are compared as settings."""
    if isinstance(one, list):
        return [stripped(part) for part in one]
    if not isinstance(one, dict):
        return one
    return {
        key: stripped(value)
        for key, value in one.items()
        if not key.startswith("app.kubernetes.io/")
        and key not in {"annotations", "data", "imagePullPolicy", "image"}
        and not (key == "labels" and stripped(value) == {"app": "headwater"})
    }


def test_the_chart_says_what_the_plain_manifests_say(tools: Path) -> None:
    on = ("serviceMonitor.enabled=true", "networkPolicy.enabled=true", "modelsClaim=models")
    chart = objects(rendered(tools, *on, "engineAutoscaling.enabled=true"))
    plain: dict[tuple[str, str], Object] = {}
    for name in ("autoscaling", "gateway", "monitoring", "network"):
        plain |= objects((FOLDER / f"{name}.yaml").read_text())
    # of the engines' side, and of autoscaled gateways, which have no fixed number
    del plain["NetworkPolicy", "vllm"], plain["HorizontalPodAutoscaler", "headwater"]
    assert chart.keys() == plain.keys()
    for key, one in plain.items():
        for side in (chart[key], one):
            volumes = side.get("spec", {}).get("template", {}).get("spec", {})
            for container in volumes.get("containers", []):
                container["volumeMounts"].sort(key=lambda mount: mount["mountPath"])
            volumes.get("volumes", []).sort(key=lambda volume: volume["name"])
        assert stripped(chart[key]) == stripped(one), key


@pytest.mark.parametrize("settings", [(), EVERYTHING], ids=["default", "everything"])
def test_its_settings_are_settings(settings: tuple[str, ...], tools: Path, tmp_path: Path) -> None:
    found = objects(rendered(tools, *settings))
    file = tmp_path / "gateway.toml"
    file.write_text(found["ConfigMap", "headwater"]["data"]["gateway.toml"])
    secret = {"HEADWATER_LISTEN__ADMIN_TOKEN": "from-a-secret"}
    config = load(GatewayConfig, file=file, env=secret, flags={})
    assert config.discovery.kubernetes.services == (("a", "b") if settings else ("vllm",))
    assert config.redis.url == "redis://redis:6379/0"
    named = {"Qwen/Qwen3-8B": "/models/Qwen3-8B"}
    assert config.render.tokenizers == (named if settings else {})
    scaled = "replicas" not in found["Deployment", "headwater"]["spec"]
    assert scaled == (("HorizontalPodAutoscaler", "headwater") in found) == bool(settings)


def test_other_settings_make_other_pods(tools: Path) -> None:
    def mark(*settings: str) -> str:
        pod = objects(rendered(tools, *settings))["Deployment", "headwater"]["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/settings"])

    assert mark() == mark()
    assert mark() != mark("settings.redis.url=none")


def test_the_chart_has_the_projects_version() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version[1], version[1])
