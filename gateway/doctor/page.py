"""Writes ``docs/doctor.md`` from the list of checks: ``python -m gateway.doctor.page FILE``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.doctor.checks import CHECKS

INTRO = """\
# headwater doctor

Generated from the code by `make docs`; do not edit.

<!-- run: slow up -->
```sh
headwater doctor -c gateway.toml                       # everything the configuration names
headwater doctor --workers http://127.0.0.1:8100,http://127.0.0.1:8101
headwater doctor -c gateway.toml --url http://127.0.0.1:8001      # and what a running gateway sees
headwater doctor -c gateway.toml --format json
```

It runs a gateway's own background side (no listener, no ledger) against the deployment for some
seconds, asks each worker for the tokens of six probe prompts, sends each one short prompt twice
with `max_tokens` 1, and says what it saw: `ok`, `warning` (it works, but not as well as it could),
`failed` or `skipped`, each failure with what to do. Exit code: 0, 1 if any check failed, 2 for a
configuration that cannot be used.

| check | asks | if it fails |
|---|---|---|
"""


def page() -> str:
    """The whole page in Markdown."""
    rows = (
        f"| `{check.id}` | {check.asks} | {check.fix} |".replace("'{", "`'{").replace("}'", "}'`")
        for check in CHECKS
    )
    return INTRO + "\n".join(rows) + "\n"


def main(arguments: Sequence[str]) -> None:
    """``FILE``"""
    Path(arguments[0]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
