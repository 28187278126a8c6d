"""Where no output can be written commands say so in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import sys; from shared.cli import main; sys.argv[0] = 'headwater'; sys.exit(main())"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
@pytest.mark.parametrize(
    "command",
    [
        *("--help", "--version", "gateway --help", "gateway --check --redis none"),
        "doctor --redis none --wait 0.1",
    ],
)
def test_a_full_disk_is_one_line_and_exit_code_1(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-c", RUN, *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "headwater: No space left on device\n")
