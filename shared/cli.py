"""The ``headwater`` command: sub-commands come from the entry-point group ``headwater.commands``.

Each entry point names a ``typer.Typer`` application. Only the command that is called is imported,
and one whose packages are not installed is still listed: it then says what is missing.

Exit codes: 0 good, 1 the check or run failed, 2 wrong usage or configuration, 130 Ctrl-C. An error
that was foreseen is one line on stderr and never a traceback.
"""

from __future__ import annotations

import copy
import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, metadata, version
from typing import Annotated, Any

import typer

from shared.argvmask import hide_arguments
from shared.errors import ConfigError, HeadwaterError

GROUP = "headwater.commands"
ORDER = (
    *("up", "gateway", "worker", "report", "explain", "index"),
    *("doctor", "lint", "bench", "simulate", "replay"),
)


def installed() -> list[EntryPoint]:
    """The commands of this installation, in the order of the help page."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    ranked = sorted(found, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    return [found[name] for name in ranked]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwater {version('headwater')}")
        raise typer.Exit


def build(points: Sequence[EntryPoint]) -> typer.Typer:
    """The command tree of the given entry points."""
    root = typer.Typer(
        name="headwater",
        help="Prefix-aware load balancing for LLM inference.",
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
        _attach(root, point)
    return root


def _attach(root: typer.Typer, point: EntryPoint) -> None:
    """Load one entry point; an application with a single command becomes that command."""
    try:
        sub: typer.Typer = point.load()
    except (ImportError, AttributeError) as error:
        _attach_missing(root, point, error)
        return
    if len(sub.registered_commands) == 1 and sub.registered_callback is None:
        command = copy.copy(sub.registered_commands[0])
        command.name = point.name
        root.registered_commands.append(command)
    else:
        root.add_typer(sub, name=point.name)


def _attach_missing(root: typer.Typer, point: EntryPoint, error: Exception) -> None:
    """A stand-in that explains why the command cannot run."""
    reason = f"cannot be loaded: {_one_line(error)}"
    if isinstance(error, ModuleNotFoundError) and point.name in _extras():
        reason = f"needs further packages ({error.name}): pip install 'headwater[{point.name}]'"
    anything: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

    @root.command(name=point.name, help=f"Not available: {reason}", context_settings=anything)
    def _missing() -> None:
        raise HeadwaterError(f"{point.name} {reason}")


def _extras() -> list[str]:
    """Optional dependency groups of the distribution; some are named after their command."""
    return metadata("headwater").get_all("Provides-Extra") or []


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run(points: Sequence[EntryPoint], arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    hide_arguments()
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    called = [point for point in points if point.name == given[0]]
    command = typer.main.get_command(build(called or points))
    try:
        code = command.main(args=given, prog_name="headwater", standalone_mode=False)
    except ConfigError as error:
        return _fail(error, 2)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        page = "headwater" if context is None else context.command_path
        return _fail(f"{error.format_message()} (see {page} --help)", error.exit_code)
    except HeadwaterError as error:
        return _fail(error, 1)
    except typer.Abort:
        return _fail("aborted", 1)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _leave_stdout()
        return _fail(error.strerror, 1)
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return code if isinstance(code, int) else 0


def _leave_stdout() -> None:
    """What is still to be written would fail once more, and be told, when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _fail(error: object, code: int) -> int:
    typer.echo(f"headwater: {_one_line(error)}", err=True)
    return code


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def main() -> None:
    """Console script."""
    sys.exit(run(installed()))
