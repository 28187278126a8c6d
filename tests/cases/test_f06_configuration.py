"""F06: a mistake in the configuration is one line with key, value, reason and a suggestion, and
exit code 2; a dead worker in the list is no mistake.

In this process, so that each kind can be tried on every command; real processes, taken ports and
dead workers: ``tests/integration/test_gateway_process.py``.
"""

from __future__ import annotations

import ast
import socket
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from shared.cli import run
from shared.layers import env_name, leaves
from worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "gateway": "gateway.cli.serve:app",
    "worker": "worker.cli:app",
    "doctor": "gateway.cli.doctor:app",
}


def call(command: str, *arguments: str) -> int:
    return run([EntryPoint(command, TARGETS[command], "headwater.commands")], [command, *arguments])


Capture = pytest.CaptureFixture[str]


def one_line(capsys: Capture, *words: str) -> None:
    """Standard error holds one line with all of these, and no stack trace."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0], lines[0]


FILES = [
    ("gateway", "[routing]\nretrys = 1\n", ("routing.retrys", "routing.retries")),
    ("gateway", "[rooting]\nretries = 1\n", ("rooting",)),
    ("gateway", "[listen]\nretries = 1\n", ("listen.retries", "routing.retries")),
    ("gateway", "[routing]\nretries = -1\n", ("routing.retries", "-1", ">= 0")),
    ("gateway", "[listen]\nport = 70000\n", ("listen.port", "70000", "65535")),
    ("gateway", '[listen]\nport = "web"\n', ("listen.port", "web")),
    ("gateway", "[workers]\nurls = 'http://a:1'\n", ("workers.urls", "http://a:1")),
    ("gateway", "[workers]\nurls = ['gpu1:8000']\n", ("workers.urls", "gpu1:8000", "http://")),
    ("gateway", "[workers]\nurls = ['http://a:1', 'http://a:1/']\n", ("workers.urls", "http://a")),
    ("gateway", "[workers]\nurls = ['http://u:p@a:1']\n", ("workers.urls", "api_key")),
    ("gateway", "[redis]\nurl = 'localhost:6379'\n", ("redis.url", "localhost", "redis://")),
    ("gateway", "[routing]\npolicy = 'cots'\n", ("routing.policy", "cots", "cost")),
    ("gateway", "[discovery.dns]\nurls = ['https://v:1']\n", ("discovery.dns.urls", "http")),
    ("gateway", "[discovery.dns]\nurl = 'http://v:1'\n", ("discovery.dns.url", ".urls")),
    ("gateway", "[discovery.file]\npath = 'w.yaml'\n", ("discovery.file.path", ".toml")),
    ("gateway", "[discovery.kubernetes]\nservices = ['v']\n", ("discovery.kubernetes",)),
    ("gateway", "[deployment]\nname = 'a b'\n", ("deployment.name", "a b")),
    ("gateway", "[listen\n", ("TOML",)),
    ("gateway", "[log]\nlevel = 'loud'\n", ("log.level", "loud", "warning")),
    ("worker", "[cache]\nblocksize = 16\n", ("cache.blocksize", "cache.block_size")),
    ("worker", "[cache]\nblock_size = 0\n", ("cache.block_size", "0", ">= 1")),
    ("worker", "[serve]\nadmin_host = '0.0.0.0'\n", ("serve.admin_token",)),
    ("worker", "[redis]\nurl = 'localhost:6379'\n", ("redis.url", "redis://")),
    ("doctor", "[routing]\nretrys = 1\n", ("routing.retrys", "routing.retries")),
]


@pytest.mark.parametrize(("command", "text", "words"), FILES)
def test_a_mistake_in_the_file(
    command: str, text: str, words: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    model = ("--model", "fake") if command == "worker" else ()
    assert call(command, "-c", str(path), *model) == 2
    one_line(capsys, *words)


@pytest.mark.parametrize("command", TARGETS)
def test_an_unreadable_file(command: str, tmp_path: Path, capsys: Capture) -> None:
    assert call(command, "-c", str(tmp_path / "none.toml")) == 2
    one_line(capsys, "none.toml", "No such file")
    assert call(command, "-c", str(tmp_path)) == 2
    one_line(capsys, "directory")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HEADWATER_ROUTING__RETRYS", "1", ("ROUTING__RETRIES",)),
        ("HEADWATER_ROUTING_RETRIES", "1", ("HEADWATER_ROUTING__RETRIES",)),
        ("HEADWATER_ROUTING__RETRIES", "many", ("routing.retries", "many", "RETRIES")),
        ("HEADWATER_DISCOVERY__DNS__URLS", "v:1", ("discovery.dns.urls", "v:1")),
    ],
)
def test_a_mistake_in_the_environment(
    name: str,
    value: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv(name, value)
    assert call("gateway", "--check") == 2
    one_line(capsys, *words)


def test_a_secret_is_not_repeated(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[listen]\nadmin_token = 12345678\n")
    assert call("gateway", "-c", str(path)) == 2
    err = capsys.readouterr().err
    assert "listen.admin_token" in err
    assert "12345678" not in err


def test_a_taken_port_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert call("worker", "--model", "fake", "--port", str(port)) == 2
        one_line(capsys, str(port), "serve.port")


@pytest.mark.parametrize(
    "text", ["", "[workers]\nurls = ['http://127.0.0.1:9']\n[routing]\npolicy = 'random'\n"]
)
def test_a_good_configuration_is_checked_without_starting(
    text: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    assert call("gateway", "--check", "-c", str(path)) == 0
    assert capsys.readouterr().out == "the configuration is good\n"


@pytest.mark.parametrize(
    ("package", "config"), [("gateway", GatewayConfig), ("worker", WorkerConfig)]
)
def test_no_option_is_accepted_and_then_ignored(package: str, config: type[Any]) -> None:
    """Each key is read by some code besides the file that declares it."""
    read: set[str] = set()
    for folder in (package, "shared"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "config.py":
                tree = ast.walk(ast.parse(path.read_text()))
                read |= {node.attr for node in tree if isinstance(node, ast.Attribute)}
    unused = [env_name(key) for key, field in leaves(config) if field.name not in read]
    assert unused == []
