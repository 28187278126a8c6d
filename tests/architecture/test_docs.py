"""Documentation that is made from the code is what the code says now."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = sorted(PROJECT["entry-points"]["headwater.commands"])


def test_the_configuration_reference_is_up_to_date(tmp_path: Path) -> None:
    made = tmp_path / "configuration.md"
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "shared.configdoc", str(made)),
            *("gateway.config:GatewayConfig", "worker.config:WorkerConfig"),
        ],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    assert made.read_text() == (ROOT / "docs" / "configuration.md").read_text(), "run `make docs`"


def test_the_page_about_the_doctor_is_up_to_date() -> None:
    from gateway.doctor.page import page

    assert page() == (ROOT / "docs" / "doctor.md").read_text(), "run `make docs`"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    headwater = str(Path(sys.executable).parent / "headwater")
    root = subprocess.run([headwater, "--help"], capture_output=True, text=True, check=True)
    assert command in root.stdout
    done = subprocess.run(
        [headwater, command, "--help"], capture_output=True, text=True, check=True
    )
    assert "xample" in done.stdout


def test_documents_that_are_linked_exist() -> None:
    import re

    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
