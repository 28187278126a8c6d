"""``python -m gateway`` is ``headwater gateway``."""

from __future__ import annotations

import sys

from gateway.cli.serve import app
from shared.argvmask import hide_arguments
from shared.errors import ConfigError

if __name__ == "__main__":
    hide_arguments()
    try:
        app(prog_name="headwater gateway")
    except ConfigError as error:
        sys.stderr.write(f"headwater: {error}\n")
        sys.exit(2)
