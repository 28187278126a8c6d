"""``docs/add-a-policy.md`` followed to the letter, in a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from caserig import GatewayLauncher
from conftest import WorkerProcess, pick_port
from rig import CHAT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add-a-policy.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
CODE = [text for language, text in BLOCKS if language == "python"]
TOML = [text for language, text in BLOCKS if language == "toml"]
COMMANDS = [
    line.strip()
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if "headwater " in line
]
FILE = "gateway/routing/policies/fits.py"


@dataclass
class Place:
    """Somewhere the policy can be imported from."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {**os.environ, "PYTHONPATH": f"{self.path}:{ROOT}"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    def headwater(self, line: str) -> subprocess.CompletedProcess[str]:
        return self.run("-c", "import shared.cli; shared.cli.main()", *line.split()[1:])


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A copy of the package with the page's file and line."""
    path = tmp_path_factory.mktemp("inside")
    for package in ("gateway", "shared"):
        shutil.copytree(
            ROOT / package, path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    assert FILE in PAGE
    (path / FILE).write_text(CODE[0])
    catalogue = path / "gateway" / "routing" / "catalogue.py"
    text = catalogue.read_text()
    for anchor, line in (
        ('    "cost": ', CODE[1]),
        ("from gateway.routing.policies.least", "from gateway.routing.policies.fits import Fits\n"),
    ):
        assert text.count(anchor) == 1
        text = text.replace(anchor, line + anchor)
    catalogue.write_text(text)
    return Place(path)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A folder with only the page's file."""
    path = tmp_path_factory.mktemp("outside")
    (path / "fits.py").write_text(CODE[0])
    return Place(path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The file as a package that is installed with the page's entry point."""
    path = tmp_path_factory.mktemp("installed")
    (path / "fits.py").write_text(CODE[0])
    groups = tomllib.loads(TOML[1])["project"]["entry-points"]
    folder = path / "headwater_fits-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: headwater-fits\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n{name} = {to}\n" for group in groups for name, to in groups[group].items()
    ]
    (folder / "entry_points.txt").write_text("".join(lines))
    return Place(path)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[GatewayLauncher]:
    """Starts gateways."""
    gateways = GatewayLauncher(tmp_path, pick_port)
    yield gateways
    gateways.end()


def test_the_page_has_what_this_test_follows() -> None:
    assert len(CODE) == 3
    assert len(TOML) == 2
    assert [line for line in COMMANDS if "simulate" in line] == COMMANDS[:2]
    assert len(COMMANDS) == 4


def test_the_check_passes(inside: Place) -> None:
    done = inside.run("-c", CODE[2])
    assert done.returncode == 0, done.stderr


def test_the_commands_simulate_it(inside: Place) -> None:
    beside, changed = (inside.headwater(line) for line in COMMANDS[:2])
    assert (beside.returncode, changed.returncode) == (0, 0), beside.stderr + changed.stderr
    rows = [line.split()[0] for line in beside.stdout.splitlines()[4:6]]
    assert rows == ["fits", "cost"]
    default, other = (
        json.loads(inside.headwater(f"{line} --policy fits --format json").stdout)["policies"]
        for line in (COMMANDS[1].partition(" --option")[0], COMMANDS[1].replace("0.5", "0.98"))
    )
    assert default != other, "its setting has an effect"


@pytest.mark.parametrize("place", ["inside", "outside", "installed"])
def test_a_gateway_serves_with_it(
    place: str,
    launch: GatewayLauncher,
    fake_worker: WorkerProcess,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    where: Place = request.getfixturevalue(place)
    shown = COMMANDS[3 if place == "outside" else 2]
    policy = shown.split("--policy ")[1]
    settings = tmp_path / "gateway.toml"
    table = TOML[0] if place != "outside" else TOML[0].replace('"fits"', f'"{policy}"')
    settings.write_text(table)
    gateway = launch(
        fake_worker.url,
        flags=("-c", str(settings)),
        env={"PYTHONPATH": where.environment["PYTHONPATH"]},
    )
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = gateway.http.post(gateway.url + CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headwater-policy"] == "fits"
    explained = gateway.http.post(f"{gateway.admin}/admin/explain", json=body).json()
    assert set(explained["workers"][0]["parts"]) == {"uncached", "no room"}


def test_an_installed_policy_is_a_name_like_any_other(installed: Place) -> None:
    line = COMMANDS[0].replace("--policy fits,cost", "--policy all --limit 30")
    done = installed.headwater(line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[4 + 11].split()[0] == "fits"
