"""Requests made from the OpenAPI documents against a running cluster: ``make fuzz-http``.

Whatever is sent, the gateway answers as its document says: no status and no body that is not in
it, and never 500. ``HEADWATER_TEST_DEPTH`` multiplies the number of requests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from depth import DEPTH
from uprig import Up

pytestmark = pytest.mark.fuzz
SCHEMATHESIS = (
    shutil.which("schemathesis", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    or "schemathesis"
)
CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"
CHANGES = "^/admin/workers"
"""Without workers there would be nothing left to ask."""
ENDLESS = "/dashboard/events"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("fuzz"), "--redis", "none")
    running.await_line("ready ")
    yield running
    running.end()


@pytest.mark.parametrize("which", ["public", "admin"])
def test_answers_are_as_documented(which: str, up: Up, tmp_path: Path) -> None:
    base = up.url if which == "public" else up.admin
    told = httpx.get(f"{base}/openapi.json", timeout=10).json()
    for methods in told["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("500", None)  # it is documented, and must not happen
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(told))
    done = subprocess.run(
        [
            *(SCHEMATHESIS, "run", str(document), "--url", base, "--checks", CHECKS),
            *("--max-examples", str(25 * DEPTH), "--request-timeout", "20", "--seed", "1"),
            *("--phases", "examples,coverage,fuzzing", "--no-color"),
            *("--exclude-path-regex", CHANGES, "--exclude-path", ENDLESS),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert httpx.get(f"{base}/health", timeout=10).status_code == 200
