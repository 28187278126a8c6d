"""What a release is made of and tried in: wheels, environments of their own, processes in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from composekit import free_port, wait_for

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "constraints.txt"


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Output of a command, which must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without anything that leads to this checkout or changes its settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HEADWATER_", "PYTHON", "VIRTUAL_ENV"))
    }
    return {**kept, **(extra or {})}


def environment(folder: Path, *requirements: str | Path) -> Path:
    """The ``bin`` of a new virtual environment with these installed."""
    run(sys.executable, "-m", "venv", folder)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    run(*pip, "-c", CONSTRAINTS, *requirements)
    return folder / "bin"


class Served:
    """A process that answers on a port of ours."""

    def __init__(
        self, folder: Path, *command: str | Path, port: int, env: Mapping[str, str]
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=clean_environment({"XDG_STATE_HOME": str(folder), **env}),
            )

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def ask(self, text: str) -> httpx.Response:
        body = {
            "model": "fake",
            "max_tokens": 4,
            "temperature": 0,
            "messages": [{"role": "user", "content": text}],
        }
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer


def cached(answer: httpx.Response) -> int:
    """Prompt tokens that the engine did not compute again."""
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def serving(
    folder: Path, *command: str | Path, port: int | None = None, env: dict[str, Any] | None = None
) -> Iterator[Served]:
    """A ready process; ``{port}`` in the command is its port. Killed if it is still there."""
    port = port or free_port()
    filled = [str(part).replace("{port}", str(port)) for part in command]
    served = Served(folder, *filled, port=port, env=env or {})
    try:
        wait_for(f"{filled[:3]} is ready", served.ready)
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()
