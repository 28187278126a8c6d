"""``headwater doctor``: checks a deployment, and says how to mend what fails."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.config import GatewayConfig
from shared.errors import ConfigError
from shared.settings import LogConfig, load

if TYPE_CHECKING:
    from gateway.doctor.checks import Finding

FORMATS = ("text", "json")

app = typer.Typer()


@app.command(
    epilog="Example: headwater doctor -c gateway.toml   |   "
    "headwater doctor --workers http://gpu1:8000 --format json"
)
def doctor(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="The gateway's TOML file.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Base URLs of workers, with commas between them.")
    ] = None,
    redis: Annotated[str | None, typer.Option(help="URL of the shared index, or none.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Admin address of a running gateway: its view is compared with ours."),
    ] = None,
    token: Annotated[
        str,
        typer.Option(
            help="Its admin token, if it wants one.",
            envvar="HEADWATER_LISTEN__ADMIN_TOKEN",
            show_default=False,
            show_envvar=True,
        ),
    ] = "",
    wait: Annotated[
        float, typer.Option(min=0.1, help="Seconds that workers may take to be seen and proved.")
    ] = 15.0,
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """Configuration, Redis, lists of workers, each worker: what fails, and what to do about it.

    Exit code 1 if any check failed.
    """
    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    from gateway.doctor.adminview import GatewayView
    from gateway.doctor.checks import failed
    from gateway.doctor.examine import examine
    from gateway.openers import check_config
    from shared.logs import configure

    flags = {"workers.urls": workers, "redis.url": redis}
    settings = load(GatewayConfig, file=config, env=os.environ, flags=flags)
    check_config(settings)
    view = None if url is None else GatewayView(url, token or settings.listen.admin_token)
    configure(LogConfig(level="error"))
    findings = asyncio.run(examine(settings, wait, view))
    typer.echo(_shown(findings, form), nl=False)
    raise typer.Exit(int(failed(findings)))


def _shown(findings: list[Finding], form: str) -> str:
    from gateway.doctor import text

    if form == "json":
        return text.to_json(findings)
    if not sys.stdout.isatty():
        return text.to_lines(findings)
    width = shutil.get_terminal_size().columns
    return text.to_table(findings, width, colour="NO_COLOR" not in os.environ)
