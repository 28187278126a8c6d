"""The layer rules that import-linter cannot express: what a pure module may not contain."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE = """
    gateway/accounting.py
    gateway/admission.py
    gateway/booking.py
    gateway/breaker.py
    gateway/capacity.py
    gateway/config.py
    gateway/discovery/slices.py
    gateway/dashboard/live.py
    gateway/dashboard/recent.py
    gateway/deciding.py
    gateway/decision.py
    gateway/doctor/checks.py
    gateway/doctor/workerdoctor.py
    gateway/explanation.py
    gateway/feeds/claims.py
    gateway/expectation.py
    gateway/feeds/members.py
    gateway/feeds/outsiders.py
    gateway/fleet.py
    gateway/ghosts.py
    gateway/index/base.py
    gateway/index/holdings.py
    gateway/index/redis.py
    gateway/index/replica.py
    gateway/index/stats.py
    gateway/index/table.py
    gateway/knowledge.py
    gateway/learn.py
    gateway/learned.py
    gateway/learnedplaces.py
    gateway/ledgerline.py
    gateway/lease.py
    gateway/member.py
    gateway/outcomes.py
    gateway/processes/changes.py
    gateway/processes/metrics.py
    gateway/processes/views.py
    gateway/parity.py
    gateway/parityforms.py
    gateway/promises.py
    gateway/reasons.py
    gateway/recency.py
    gateway/records.py
    gateway/reload.py
    gateway/router.py
    gateway/scopes.py
    gateway/lint/causes.py
    gateway/lint/check.py
    gateway/lint/compare.py
    gateway/lint/findings.py
    gateway/lint/text.py
    gateway/loadtest/result.py
    gateway/loadtest/stats.py
    gateway/loadtest/text.py
    gateway/loadtest/tracetext.py
    gateway/loadtest/workloads.py
    gateway/sim/bounds.py
    gateway/sim/model.py
    gateway/sim/fit.py
    gateway/sim/recorded.py
    gateway/sim/recount.py
    gateway/sim/recounttext.py
    gateway/sim/redecide.py
    gateway/sim/turns.py
    gateway/sim/replay.py
    gateway/sim/result.py
    gateway/sim/simulate.py
    gateway/sim/text.py
    gateway/sim/trace.py
    gateway/sim/worker.py
    gateway/status.py
    gateway/tally.py
    gateway/trust.py
    gateway/trustwatch.py
    gateway/views.py
    shared/blocks.py
    shared/bulk.py
    shared/checks.py
    shared/deadline.py
    shared/errors.py
    shared/events.py
    shared/freelist.py
    shared/headernum.py
    shared/hosttier.py
    shared/jsonsplice.py
    shared/lifetimes.py
    shared/load.py
    shared/openai.py
    shared/paging.py
    shared/pagingevents.py
    shared/pagingproof.py
    shared/prefixtree.py
    shared/rediskeys.py
    shared/sse.py
    shared/types.py
    worker/calljson.py
    worker/config.py
    worker/deadlines.py
    worker/detokenise.py
    worker/drive.py
    worker/guide.py
    worker/hostpace.py
    worker/lark.py
    worker/logprobshape.py
    worker/pace.py
    worker/probe.py
    worker/reach.py
    worker/roster.py
    worker/runner.py
    worker/scheduler.py
    worker/seqblocks.py
    worker/sequence.py
    worker/siblings.py
    worker/steptime.py
    worker/structured.py
    worker/toolask.py
    worker/toolformat.py
    worker/toolread.py
    worker/verdict.py
""".split()
PURE_FOLDERS = ("gateway/routing", "gateway/routing/policies", "gateway/engines")
FORBIDDEN = {
    *("asyncio", "aiohttp", "httpx", "redis", "time", "random", "os", "logging", "structlog"),
    *("socket", "threading", "subprocess", "datetime", "secrets", "uuid"),
}


def pure_files() -> list[Path]:
    """Every module that the architecture marks as pure."""
    folders = [p for name in PURE_FOLDERS for p in sorted((ROOT / name).glob("*.py"))]
    return [ROOT / name for name in PURE] + folders


def violations(tree: ast.AST) -> list[str]:
    """What in a module breaks purity."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            found.append(f"line {node.lineno}: async code")
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
            # the *type* of an RNG that comes in as an argument is no source of randomness
            if node.module == "random" and [a.name for a in node.names] == ["Random"]:
                names = []
        found += [f"line {node.lineno}: imports {n}" for n in names if n.split(".")[0] in FORBIDDEN]
    return found


@pytest.mark.parametrize("path", pure_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_pure_modules_hold_no_io_clock_or_randomness(path: Path) -> None:
    assert violations(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from os import environ",
        "import random",
        "async def f(): ...",
        "from random import Random, random",
        "import redis.asyncio as r",
    ],
)
def test_the_check_finds_each_kind_of_violation(source: str) -> None:
    assert violations(ast.parse(source))


LARGE_INDEX = {"cells.py", "cellstore.py", "compact.py"}
"""Loaded by ``gateway.index.backends`` where numpy is at hand and an index has grown large."""


def test_torch_stays_below_worker_model() -> None:
    heavy = {"torch", "transformers", "safetensors", "gguf", "accelerate", "numpy"}
    for path in [
        *ROOT.glob("gateway/**/*.py"),
        *ROOT.glob("shared/**/*.py"),
        *ROOT.glob("worker/**/*.py"),
    ]:
        if path.is_relative_to(ROOT / "worker" / "model"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            found = {m.split(".")[0] for m in modules} & heavy
            if path.name in LARGE_INDEX:
                found -= {"numpy"}
            assert not found, f"{path.relative_to(ROOT)}:{node.lineno} imports {found}"


@pytest.mark.parametrize(
    "module", ["gateway.build", "gateway.cli.up", "worker.build", "worker.cli"]
)
def test_importing_a_command_does_not_load_torch(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "sys.exit(','.join(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "lint-imports"),
            "--config",
            "pyproject.toml",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
