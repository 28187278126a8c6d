"""Documentation that is made from the code is what the code says now."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from promkit import scraped

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


def test_the_reference_of_commands_is_up_to_date() -> None:
    from shared.clidoc import page

    assert page() == (ROOT / "docs" / "cli.md").read_text(), "run `make docs`"


def test_the_reference_of_metrics_is_up_to_date() -> None:
    from shared.metricsdoc import page

    told = re.findall(r'"([^"=]+)=([\w.]+:\w+)"', (ROOT / "Makefile").read_text())
    assert page(told) == (ROOT / "docs" / "metrics.md").read_text(), "run `make docs`"


def test_the_reference_of_metrics_names_what_a_busy_gateway_and_worker_show() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name, labels in scraped().items():
        bare = re.sub(r"_(bucket|sum|count)$", "", name)
        if not bare.startswith("headwater_") or bare.endswith("_created"):
            continue
        rows = [line for line in page.splitlines() if line.startswith(f"| `{bare}` ")]
        assert len(rows) == 1, f"{bare} has {len(rows)} rows"
        [row] = rows
        for label in set(labels) - {"le"}:
            assert f"`{label}`" in row, (name, label)


def test_the_tables_of_routes_are_up_to_date() -> None:
    from gateway.openapi.write import update

    page = (ROOT / "docs" / "http.md").read_text()
    assert update(page) == page, "run `make docs`"


def test_the_page_about_http_lists_the_workers_routes() -> None:
    from worker.admin import admin_app
    from worker.config import WorkerConfig
    from worker.server import WorkerServer

    server = WorkerServer(WorkerConfig(), announce=lambda _: None)
    page = (ROOT / "docs" / "http.md").read_text()
    listed = set(re.findall(r"^\| `(\w+ /\S+)` \|", page.partition("## A worker")[2], re.MULTILINE))
    served = {
        f"{route.method} {route.resource.canonical}"
        for application in (server._public_app(), admin_app(server._service))
        for route in application.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert listed == served


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    headwater = str(Path(sys.executable).parent / "headwater")
    root = subprocess.run([headwater, "--help"], capture_output=True, text=True, check=True)
    assert command in root.stdout
    done = subprocess.run(
        [headwater, command, "--help"], capture_output=True, text=True, check=True
    )
    assert "xample" in done.stdout
