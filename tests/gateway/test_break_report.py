"""Numbers in a ledger whose sums need more than 64 bits are refused by name, not with a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.report import summarise
from gateway.report.load import LedgerError

TOP = 2**63 - 1


@pytest.mark.parametrize(
    "flow",
    [
        {"prompt": 16, "tail": TOP, "cold": TOP},
        {"prompt": TOP, "tail": 16, "cold": TOP},
        {"prompt": TOP, "avail": TOP, "captured": TOP, "delivered": 0, "gained": TOP},
    ],
)
def test_sums_beyond_64_bits(flow: dict[str, int], tmp_path: Path) -> None:
    line = {"at": 1.0, "id": "r-1", "route": "/v1/x", "model": "m", "flow": flow}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(LedgerError, match="r-1"):
        summarise([tmp_path / "a.jsonl"])
