"""A gateway's trace file, from requests to a simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rig import CHAT, ask, chat

from gateway.tracefile import read_traced, trace_files
from shared.cli import installed, run
from shared.errors import ConfigError

SYSTEM = "You answer shortly and never guess. " * 40


async def test_requests_are_kept_and_can_be_simulated(
    stub: Any, serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = await serve(await stub(), **{"ledger.dir": str(tmp_path), "ledger.trace": True})
    for number in range(6):
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"canary-{number} " * 30},
        ]
        body = {"model": "m", "messages": messages, "stream": number % 2 == 0}
        assert (await ask(served.url, CHAT, body)).status == 200
    assert (await ask(served.url, CHAT, {"model": "none", "messages": []})).status >= 400
    assert (await ask(served.url, "/v1/embeddings", {"model": "m", "input": "x"})).status == 200
    await served.gateway.drain()
    served.gateway._trace.flush()
    served.gateway._ledger.flush()
    (file,) = trace_files(tmp_path)
    assert b"canary" not in file.read_bytes()
    assert b"guess" not in file.read_bytes()
    traced = list(read_traced([file]))
    ledger = [json.loads(line) for line in served.gateway._ledger.path.read_bytes().splitlines()]
    assert {one.id for one in traced} < {line.get("id") for line in ledger}
    assert len(traced) == 6
    shared = len(SYSTEM) // 64 - 1
    assert len({tuple(one.keys[:shared]) for one in traced}) == 1
    assert len({tuple(one.keys) for one in traced}) == 6
    sizes = [len(line) for line in file.read_bytes().splitlines()]
    assert max(sizes[1:]) < sizes[0]
    capsys.readouterr()
    simulate = ["simulate", str(tmp_path), "--workers", "2", "--kv-blocks", "500"]
    assert run(installed(), [*simulate, "--policy", "cost,random", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] == 6
    assert result["bounds"]["infinite_hit_rate"] > 0.3


async def test_off_by_default_and_needs_a_folder(stub: Any, serve: Any, tmp_path: Path) -> None:
    served = await serve(await stub(), **{"ledger.dir": str(tmp_path)})
    assert (await ask(served.url, CHAT, chat())).status == 200
    assert not (tmp_path / "trace").exists()
    with pytest.raises(ConfigError, match=r"ledger\.trace"):
        await serve(await stub(), **{"ledger.trace": True})
