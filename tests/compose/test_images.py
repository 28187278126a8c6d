"""What is in the images: no torch for the gateway, no root, no installer, and a true list of it."""

from __future__ import annotations

import json

import pytest
from composekit import Project, docker

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

LISTING = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in m.distributions()}))"
)
"""Run by the interpreter of the environment, which has no other packages on its path."""


SERVICES = {"gateway": ("fake", "HEADWATER_IMAGE"), "worker": ("cpu", "HEADWATER_WORKER_IMAGE")}


def built(service: str) -> str:
    """The image that compose.yaml builds for a service."""
    profile, variable = SERVICES[service]
    tag = f"headwater-test:{service}"
    Project(profile, env={variable: tag}).compose("build", service)
    return tag


@pytest.fixture(scope="module", params=list(SERVICES))
def image(request: pytest.FixtureRequest) -> str:
    return built(request.param)


def inside(image: str, *command: str) -> str:
    entry, *rest = command
    return docker("run", "--rm", "--network", "none", "--entrypoint", entry, image, *rest)


def packages(image: str) -> dict[str, str]:
    return dict(json.loads(inside(image, "/opt/headwater/bin/python", "-c", LISTING)))


def test_the_list_in_the_image_is_what_is_installed(image: str) -> None:
    bom = json.loads(inside(image, "cat", "/opt/headwater/sbom.cdx.json"))
    assert bom["bomFormat"] == "CycloneDX"
    listed = {
        one["name"].lower().replace("_", "-"): one["version"]
        for one in [*bom["components"], bom["metadata"]["component"]]
    }
    assert listed == packages(image)


def test_torch_is_in_the_worker_alone_and_nothing_installs_packages(image: str) -> None:
    found = packages(image)
    heavy = {"torch", "transformers", "numpy"} & found.keys()
    assert heavy == ({"torch", "transformers", "numpy"} if image.endswith("worker") else set())
    assert not {"pip", "cyclonedx-bom"} & found.keys()  # torch itself asks for setuptools
    assert docker("inspect", "-f", "{{.Config.User}}", image) == "10001:10001"
    assert inside(image, "id", "-u") == "10001"


def test_the_command_is_there(image: str) -> None:
    shown = docker("run", "--rm", "--read-only", "--network", "none", image, "--version")
    assert shown == f"headwater {packages(image)['headwater']}"


def test_the_gateway_is_small() -> None:
    tag = built("gateway")
    base = int(docker("inspect", "-f", "{{.Size}}", "python:3.11-slim"))
    size = int(docker("inspect", "-f", "{{.Size}}", tag))
    assert size - base < 250e6
