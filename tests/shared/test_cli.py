"""The command's frame: exit codes, one-line errors, commands that are not installed."""

from __future__ import annotations

import re
import sys
import types
from importlib.metadata import EntryPoint

import pytest
import typer

from shared.cli import GROUP, build, installed, run
from shared.errors import BadRequest, ConfigError, HeadwaterError

app = typer.Typer()


@app.command(epilog="Example: headwater one")
def one(
    what: str = typer.Option("fine", help="What to do."), count: int = typer.Option(1, min=1)
) -> None:
    """Does one thing."""
    if what == "config":
        raise ConfigError("listen.port", -1, "must be\nat least 0")
    if what == "failed":
        raise BadRequest("no such thing")
    if what == "exit":
        raise typer.Exit(count)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "abort":
        raise typer.Abort
    if what == "leave":
        sys.exit(count)
    if what == "bug":
        raise RuntimeError("a bug")
    typer.echo(f"{what} {count}")


several = typer.Typer(help="Two things.")


@several.command()
def first() -> None:
    """The first."""
    typer.echo("first")


@several.command()
def second() -> None:
    """The second."""


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    module = types.ModuleType("headwater_test_commands")
    module.app, module.several = app, several  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return [
        EntryPoint("one", f"{module.__name__}:app", GROUP),
        EntryPoint("several", f"{module.__name__}:several", GROUP),
        EntryPoint("worker", "no_such_package_at_all.cli:app", GROUP),
        EntryPoint("odd", f"{module.__name__}:missing", GROUP),
    ]


def test_help_lists_all_commands_also_those_that_cannot_run(
    points: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(points, ["--help"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "one",
        "Does one thing.",
        "several",
        "Two things.",
        "worker",
        "Not available",
        "odd",
    ):
        assert text in shown
    assert run(points, []) == 0
    assert capsys.readouterr().out == shown


def test_a_command_runs(points: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(points, ["one", "--count", "3"]) == 0
    assert run(points, ["several", "first"]) == 0
    assert capsys.readouterr().out == "fine 3\nfirst\n"


def test_help_of_a_command(points: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(points, ["one", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: headwater one" in shown
    assert "Example: headwater one" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["one", "--what", "config"], 2, "listen.port: -1: must be at least 0"),
        (["one", "--what", "failed"], 1, "no such thing"),
        (["one", "--what", "abort"], 1, "aborted"),
        (["one", "--cuont", "1"], 2, "--cuont"),
        (["one", "--count", "x"], 2, "--count"),
        (["one", "--count", "0"], 2, "--count"),
        (["one", "more"], 2, "more"),
        (["oen"], 2, "oen"),
        (["--nothing"], 2, "--nothing"),
        (["several", "third"], 2, "third"),
        (["worker", "--model", "x", "y"], 1, "pip install 'headwater[worker]'"),
        (["odd"], 1, "cannot be loaded"),
    ],
)
def test_foreseen_errors_are_one_line(
    points: list[EntryPoint],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    assert run(points, arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("headwater: ")
    assert text in line


@pytest.mark.parametrize(
    ("what", "code"), [("exit", 4), ("leave", 4), ("interrupt", 130), ("fine", 0)]
)
def test_exit_codes(points: list[EntryPoint], what: str, code: int) -> None:
    assert run(points, ["one", "--what", what, "--count", "4"]) == code


def test_a_bug_is_not_hidden(points: list[EntryPoint]) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        run(points, ["one", "--what", "bug"])


def test_only_the_called_command_is_imported(
    points: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda p: loaded.append(p.name) or load(p))
    assert run(points, ["one"]) == 0
    assert loaded == ["one"]


def test_the_missing_command_raises_inside_its_own_run(points: list[EntryPoint]) -> None:
    command = typer.main.get_command(build(points[2:3]))
    with pytest.raises(HeadwaterError, match="no_such_package_at_all"):
        command.main(args=["worker"], standalone_mode=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(installed(), ["--version"]) == 0
    assert capsys.readouterr().out.startswith("headwater ")


def test_the_installed_commands_come_in_their_order() -> None:
    names = [point.name for point in installed()]
    assert names[:2] == ["up", "gateway"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("point", installed(), ids=lambda point: point.name)
def test_no_word_in_brackets_is_taken_for_markup(point: EntryPoint) -> None:
    """A section of the configuration, ``[ledger]`` say, would vanish from the help page."""
    found = typer.main.get_command(build([point])).commands[point.name]  # type: ignore[attr-defined] # a group
    for command in [found, *getattr(found, "commands", {}).values()]:
        texts = [command.help, command.epilog, *(getattr(p, "help", "") for p in command.params)]
        for text in texts:
            assert not re.search(r"(?<!\\)\[[a-z_./]+\]", text or ""), text
