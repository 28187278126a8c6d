"""``python -P -m worker``: the worker command without the rest of the command line."""

from __future__ import annotations

import sys

from shared.argvmask import hide_arguments
from shared.errors import ConfigError
from worker.cli import app


def main() -> int:
    """Exit code: 0 good, 1 failed, 2 wrong usage or configuration."""
    hide_arguments()
    try:
        app(prog_name="worker")
    except ConfigError as error:
        sys.stderr.write(f"worker: {error}\n")
        return 2
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
