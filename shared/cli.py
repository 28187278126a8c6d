"""The ``headwater`` command: sub-commands come from the entry-point group ``headwater.commands``.

Each entry point names a ``typer.Typer`` application in a module that imports nothing heavy, so the
gateway's commands work without the worker's packages and the other way round.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated

import typer

from shared.errors import ConfigError

GROUP = "headwater.commands"
ORDER = ("up", "gateway", "worker", "report", "explain")


def _installed() -> list[EntryPoint]:
    found = {point.name: point for point in entry_points(group=GROUP)}
    ranked = sorted(found, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    return [found[name] for name in ranked]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwater {version('headwater')}")
        raise typer.Exit


def build(points: list[EntryPoint]) -> typer.Typer:
    """The command tree of the given entry points."""
    root = typer.Typer(
        name="headwater",
        help="Prefix-aware load balancing for LLM inference.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    @root.callback()
    def _root(
        _version: Annotated[
            bool,
            typer.Option("--version", callback=_show_version, is_eager=True, help="Show version."),
        ] = False,
    ) -> None:
        """Prefix-aware load balancing for LLM inference."""

    for point in points:
        sub: typer.Typer = point.load()
        if len(sub.registered_commands) == 1 and sub.registered_callback is None:
            command = sub.registered_commands[0]
            root.command(name=point.name, help=command.help, epilog=command.epilog)(
                command.callback or (lambda: None)
            )
        else:
            root.add_typer(sub, name=point.name)
    return root


def run(points: list[EntryPoint], arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 good, 1 failed, 2 wrong usage or configuration)."""
    command = typer.main.get_command(build(points))
    try:
        code = command.main(args=arguments, prog_name="headwater", standalone_mode=True)
    except ConfigError as error:
        print(f"headwater: {error}", file=sys.stderr)  # noqa: T201 - the one-line error
        return 2
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 1
    return code if isinstance(code, int) else 0


def main() -> None:
    """Console script."""
    sys.exit(run(_installed()))
