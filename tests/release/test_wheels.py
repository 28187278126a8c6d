"""The wheel of what is committed: the same bytes each time, and whole where nothing else is."""

from __future__ import annotations

import os
import shutil
import sys
import time
import zipfile
from pathlib import Path

import pytest
from composekit import free_port
from releasekit import CONSTRAINTS, PROJECT, ROOT, cached, environment, run, serving

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    run(ROOT / "scripts" / "dist.sh", target, env={"PYTHON": sys.executable})
    [found] = target.glob("*.whl")
    return found


def test_two_builds_are_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "a clone"
    run("git", "clone", "-q", ROOT, elsewhere)
    time.sleep(1.1)  # another second on the clock, another zone, other rights of files
    before = os.umask(0o077)
    try:
        run(
            *(elsewhere / "scripts" / "dist.sh", tmp_path / "dist"),
            env={"PYTHON": sys.executable, "TZ": "Pacific/Auckland", "LC_ALL": "C"},
        )
    finally:
        os.umask(before)
    sums = [folder / "SHA256SUMS" for folder in (wheel.parent, tmp_path / "dist")]
    assert sums[0].read_text() == sums[1].read_text()
    assert len(sums[0].read_text().splitlines()) == 2


def test_the_wheel_has_what_the_packages_have(wheel: Path) -> None:
    committed = run("git", "ls-files", "gateway", "worker", "shared").splitlines()
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        [licence] = [name for name in packed.namelist() if name.endswith("licenses/LICENSE")]
        assert packed.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert names == set(committed)


def test_a_gateway_alone_starts_and_serves_fakes(wheel: Path, tmp_path: Path) -> None:
    tools = environment(tmp_path / "env", wheel)
    assert run(tools / "headwater", "--version") == f"headwater {PROJECT['version']}"
    listed = run(tools / "python", "-m", "pip", "list", "--format", "freeze").lower()
    for heavy in ("torch", "transformers", "numpy"):
        assert f"\n{heavy}==" not in f"\n{listed}"
    helped = run(tools / "headwater", "--help")
    assert set(PROJECT["entry-points"]["headwater.commands"]) <= set(helped.split())
    ports = free_port()
    command = [tools / "headwater", "up", "--fake", "--redis", "none", "--port", "{port}"]
    with serving(tmp_path / "run", *command, "--worker-port", str(ports)) as up:
        prompt = "The same long beginning of a prompt. " * 20
        first, second = up.ask(prompt), up.ask(prompt)
        assert (cached(first), cached(second) > 100) == (0, True)
        assert second.headers["x-headwater-worker"] == first.headers["x-headwater-worker"]
        assert up.stop() == 0
    report = run(tools / "headwater", "report", env={"XDG_STATE_HOME": str(tmp_path / "run")})
    assert "prompt tokens" in report


@pytest.mark.parametrize("tool", ["pipx", "uv"])
def test_it_installs_as_a_tool(tool: str, wheel: Path, tmp_path: Path) -> None:
    program = environment(tmp_path / "env", tool) / tool
    where = {
        "PIPX_HOME": str(tmp_path / "pipx"),
        "PIPX_BIN_DIR": str(tmp_path / "bin"),
        "UV_TOOL_DIR": str(tmp_path / "uv"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
    }
    shutil.copy(CONSTRAINTS, tmp_path / "constraints.txt")  # their paths must not need quotes
    arguments = {
        "pipx": ["install", f"--pip-args=-c {tmp_path / 'constraints.txt'}", wheel],
        "uv": ["tool", "install", "--python", sys.executable, "--constraints", CONSTRAINTS, wheel],
    }
    run(program, *arguments[tool], env=where)
    shown = run(tmp_path / "bin" / "headwater", "--version")
    assert shown == f"headwater {PROJECT['version']}"
