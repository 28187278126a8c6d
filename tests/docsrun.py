"""Runs the commands of the documentation: in a folder of examples, beside a cluster of its own.

Addresses in the text are those of `make up`; they are replaced by the cluster's. The default ones
of commands (``headwater index stats``) are given as flags by a stand-in on the ``PATH``.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
from docskit import ROOT, Block
from simkit import cut
from tokenstub import bos_bundle
from uprig import Up

from gateway.emulators.tokenizerfiles import write_tokenizer

MODEL = "SmolLM2-135M-Instruct"
WITH_URL = {"bench": "public", "explain": "admin", "index": "admin"}
"""Commands that ask a running gateway, and which of its listeners."""
SHIM = """#!{python}
import sys
urls, commands = {urls!r}, {commands!r}
given = sys.argv[1:]
kind = commands.get(given[0]) if given else None
if kind and urls and "--url" not in given:
    given += ["--url", urls[kind]]
sys.argv = ["headwater", *given]
from shared.cli import main
main()
"""


@dataclass(frozen=True)
class Cluster:
    """Where a gateway and its workers listen: base URLs."""

    url: str
    admin: str
    workers: tuple[str, ...]

    @classmethod
    def of(cls, up: Up) -> Cluster:
        """That of ``headwater up``."""
        ports = range(up.worker_port, up.worker_port + 2)
        return cls(up.url, up.admin, tuple(f"http://127.0.0.1:{port}" for port in ports))


@dataclass
class Place:
    """A folder in which commands are run."""

    folder: Path
    cluster: Cluster | None
    model: str = "fake"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _examples(self.folder, self.model)
        urls = {}
        if self.cluster is not None:
            urls = {"public": self.cluster.url, "admin": self.cluster.admin}
            workers = ", ".join(f'"{url}"' for url in self.cluster.workers)
            (self.folder / "gateway.toml").write_text(f"[workers]\nurls = [{workers}]\n")
        bin_ = self.folder / "bin"
        bin_.mkdir()
        shim = bin_ / "headwater"
        shim.write_text(SHIM.format(python=sys.executable, urls=urls, commands=WITH_URL))
        shim.chmod(0o755)
        (bin_ / "python").symlink_to(sys.executable)

    def run(self, block: Block, within_s: float = 300) -> str:
        """Run a block as one script; returns its output. Fails if a command does."""
        script = self.localised(block.text)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=within_s,
        )
        told = f"{block.name}\n{script}\n{done.stdout}"
        assert done.returncode == 0, f"exit code {done.returncode}: {told}"
        assert '{"error"' not in done.stdout, told
        return done.stdout

    def localised(self, text: str) -> str:
        """The text with this place's addresses and files."""
        text = text.replace(MODEL, self.model).replace("bench/traces/", f"{ROOT}/bench/traces/")
        if self.cluster is None:
            return text
        told = {8000: self.cluster.url, 8001: self.cluster.admin}
        told |= dict(enumerate(self.cluster.workers, 8100))
        for usual, own in told.items():
            text = text.replace(f"127.0.0.1:{usual}", own.removeprefix("http://"))
        return text.replace("/var/lib/headwater/ledger", shlex.quote(str(self.ledger)))

    @property
    def ledger(self) -> Path:
        """Where the cluster's gateway writes."""
        return self.folder.parent / "ledger"

    def environment(self) -> dict[str, str]:
        """Of the commands."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "HEADWATER_LEDGER__DIR": str(self.ledger),
            "XDG_STATE_HOME": str(self.folder.parent),
            "NO_COLOR": "1",
        }


def _examples(folder: Path, model: str) -> None:
    """The files that the documentation speaks of."""
    requests = [
        {
            "model": model,
            "max_tokens": 4,
            "messages": [
                {"role": "system", "content": f"Today is 2026-05-{day:02}. " + "Be helpful. " * 40},
                {"role": "user", "content": f"Question {day}"},
            ],
        }
        for day in range(1, 25)
    ]
    (folder / "request.json").write_text(json.dumps(requests[0]))
    lines = "".join(json.dumps(one) + "\n" for one in requests)
    (folder / "requests.jsonl").write_text(lines)
    (folder / "batch.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_tokenizer(bos_bundle(), folder / "model")
    trace = cut("sharegpt_a.b64.jsonl.gz", 120, folder)
    (folder / "chats.b64.jsonl.gz").write_bytes(gzip.compress(trace.read_bytes()))


def local_cluster(folder: Path, *flags: str) -> Up:
    """A cluster that keeps a ledger with traces and has served some requests."""
    up = Up(folder, "--redis", "none", *flags)
    up.await_line("ready ")
    return up


def some_traffic(up: Up, place: Place) -> None:
    """What a report needs to have something to say."""
    lines = (place.folder / "requests.jsonl").read_text().splitlines()
    with httpx.Client(trust_env=False, timeout=60) as client:
        for line in (*lines, *lines):
            answer = client.post(
                f"{up.url}/v1/chat/completions",
                content=line,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 200, answer.text
    (place.folder / "ledgers").mkdir()
    for file in place.ledger.glob("*.jsonl"):
        packed = place.folder / "ledgers" / f"{file.name}.gz"
        packed.write_bytes(gzip.compress(file.read_bytes()))
