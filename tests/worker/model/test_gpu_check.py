"""The GPU check's own dry run: every stage works, and its exit code says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    import bench.gpu_check

    return bench.gpu_check


@pytest.mark.parametrize("name", ["correct logits", "correct tokens"])
def test_correctness_stages_pass_on_a_cpu(check: Any, name: str) -> None:
    found = check.STAGES[name][0](check.DRY)
    assert found["ok"], found


@pytest.mark.parametrize("name", ["prefill", "decode", "decode, replayed", "ours"])
def test_stages_that_measure_find_a_rate(check: Any, name: str) -> None:
    found = check.STAGES[name][0](check.DRY)
    assert found
    assert all(rate > 0 for rate in found.values())


def test_the_warm_prompt_is_cached(check: Any) -> None:
    found = check.ttft(check.DRY)
    for length in check.DRY["ttft"]:
        assert found[f"TTFT {length} cached"] == (length - 48) // check.BLOCK * check.BLOCK


def test_the_limits_fit_into_eight_minutes(check: Any) -> None:
    assert sum(limit for _, limit in check.STAGES.values()) <= 480


@pytest.mark.parametrize(
    ("correct", "code"), [({"ok": True}, 0), ({"ok": False}, 1), ({"failed": "over its limit"}, 1)]
)
def test_only_correctness_decides_the_exit_code(
    check: Any, monkeypatch: pytest.MonkeyPatch, correct: dict[str, Any], code: int
) -> None:
    def stage(name: str, _: float, *, dry: bool) -> dict[str, Any]:
        assert dry
        return dict(correct) if name == "correct tokens" else {"ok": True}

    monkeypatch.setattr(check, "run_stage", stage)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run"])
    assert check.main() == code


def test_a_stage_that_breaks_is_a_line(check: Any) -> None:
    found = check.run_stage("no such stage", 60, dry=True)
    assert "no such stage" in found["failed"]


def test_the_script_runs_and_writes_its_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(ROOT / "bench" / "gpu_check.sh"),
            *("--dry-run", "--only", "environment", "--out", str(tmp_path / "o.json")),
        ],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"dry_run": true' in (tmp_path / "o.json").read_text()
