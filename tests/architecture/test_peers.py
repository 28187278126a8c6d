"""The benchmark beside other routers starts a gateway as it is shipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "bench" / "peers"
ASK = (
    "import json, targets; "
    "print(json.dumps([t['ours'](9401, ['http://127.0.0.1:9101', 'http://127.0.0.1:9102'])"
    " for t in (targets.TARGETS, targets.ROUTING)]))"
)


def test_the_gateway_that_is_measured_starts_with_what_the_benchmark_says(tmp_path: Path) -> None:
    env = {**os.environ, "BENCH_VENVS": str(tmp_path), "BENCH_PYTHON": sys.executable}
    asked = [sys.executable, "-c", ASK]
    told = subprocess.run(asked, cwd=PEERS, env=env, check=True, capture_output=True, timeout=60)
    [overhead, routing] = json.loads(told.stdout)
    assert overhead == routing
    command, more = overhead
    assert "--ledger" in command
    asked = [*command, "--check"]
    checked = subprocess.run(
        asked, env={**env, **more}, check=False, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", sorted(PEERS.rglob("*.py")), ids=lambda path: path.name)
def test_no_part_of_it_names_a_folder_of_one_machine(path: Path) -> None:
    text = path.read_text()
    compile(text, str(path), "exec")
    for folder in ("/work", "/tmp", "/home/", "/root/"):
        assert folder not in text
