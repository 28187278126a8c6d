"""Secrets among the arguments of a process: found, and not shown to who lists processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.argvmask import secrets_in

_SHOW = (
    "import sys; from shared.argvmask import hide_arguments; hide_arguments(); "
    "shown = open('/proc/self/cmdline', 'rb').read().replace(b'\\0', b' ').decode(); "
    "print(shown); print(*sys.argv)"
)


@pytest.mark.parametrize(
    ("arguments", "secrets"),
    [
        (["--redis", "redis://:CANARY@h:1/0"], ["CANARY"]),
        (["--redis=rediss://user:CAN%40ARY@h"], ["CAN%40ARY"]),
        (["--redis", "redis+cluster://u:p:w@a:1,b:2"], ["p:w"]),
        (["--redis", "redis://:p@ss@h"], ["p@ss"]),
        (["--redis", "redis://h:6379/0"], []),
        (["--workers", "http://a:1,http://b:2"], []),
        (["http://user:pw@worker:8000"], ["pw"]),
        (["--token", "t1", "x"], ["t1"]),
        (["--token=t2"], ["t2"]),
        (["--token"], []),
        (["--token="], []),
    ],
)
def test_secrets_are_found(arguments: list[str], secrets: list[str]) -> None:
    assert secrets_in(["gateway", *arguments]) == secrets
    assert secrets_in(arguments) == secrets


def test_a_command_without_arguments_has_none() -> None:
    assert secrets_in([]) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux shows arguments so")
def test_secrets_are_not_shown_and_still_there() -> None:
    given = ["--redis", "redis://u:CANARY-ö-5@h:1/0", "--token", "CANARY", "--name=CANARY-ö-5x"]
    run = subprocess.run(
        [sys.executable, "-P", "-c", _SHOW, *given], capture_output=True, text=True, check=True
    )
    shown, kept = run.stdout.splitlines()
    assert "CANARY" not in shown
    assert "redis://u:***********@h:1/0" in shown
    assert shown.count("--token ******") == 1
    assert kept == " ".join(["-c", *given])
