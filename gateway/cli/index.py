"""``headwater index``: what a gateway's index holds, who holds a prompt, and forgetting it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn, TypeVar

import httpx
import msgspec
import typer

from gateway.cli.explain import (
    BODY,
    DEFAULT_URL,
    FORMATS,
    ROUTE,
    TENANT_MISSING,
    make_client,
    read_request,
)
from shared.errors import ConfigError, HeadwaterError

PATH = "/admin/index"

app = typer.Typer(
    help="What a gateway's index holds, who holds a prompt, and forgetting it.",
    no_args_is_help=True,
    epilog="Example: headwater index stats   |   headwater index who request.json   |   "
    "headwater index flush --all",
)

_Url = Annotated[str, typer.Option(help="The gateway's admin address.")]
_Token = Annotated[
    str,
    typer.Option(
        help="The admin token, if the gateway wants one.",
        envvar="HEADWATER_LISTEN__ADMIN_TOKEN",
        show_default=False,
        show_envvar=True,
    ),
]
_Form = Annotated[str, typer.Option("--format", help="text or json.")]


class IndexFailed(HeadwaterError):
    """The gateway gave no answer; the message is one line."""


class Contents(msgspec.Struct, frozen=True):
    """What one worker holds."""

    id: str
    trust: str
    trust_reason: str
    blocks: int
    host_blocks: int
    tokens: int
    block_tokens: int
    learned_tokens: int
    seq: int | None = None


class Stats(msgspec.Struct, frozen=True):
    """Answer of ``GET /admin/index``."""

    entries: int
    max_entries: int
    seen_blocks: int
    shared_prefixes: int
    workers: list[Contents]


class Holder(msgspec.Struct, frozen=True):
    """What one worker has of a prompt, tokens."""

    id: str
    state: str
    trust: str
    tokens: int
    host_tokens: int = 0
    promised_tokens: int = 0


class Who(msgspec.Struct, frozen=True):
    """Answer of ``POST /admin/index/who``."""

    request: dict[str, Any]
    prompt_tokens: int
    matchable_tokens: int
    seen_tokens: int
    holders: list[Holder]


class Flushed(msgspec.Struct, frozen=True):
    """Answer of ``POST /admin/index/flush``: worker -> entries that were forgotten."""

    flushed: dict[str, int]


@app.command(epilog="Example: headwater index stats   |   headwater index stats --format json")
def stats(url: _Url = DEFAULT_URL, token: _Token = "", form: _Form = "text") -> None:
    """What the index holds, of all workers and of each."""
    answer = _ask("GET", PATH, None, url, token, form)
    _show(answer, Stats, form, _stats_text)


@app.command(
    epilog="Example: headwater index who request.json   |   "
    'echo \'{"messages": [{"role": "user", "content": "Hi"}]}\' | headwater index who -'
)
def who(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST.json",
            help=BODY,
        ),
    ],
    url: _Url = DEFAULT_URL,
    token: _Token = "",
    tenant: Annotated[
        str,
        typer.Option(
            help="Whose prompt it is: the name of a tenant. Where tenants are kept apart nothing "
            "is found without it.",
            show_default=False,
        ),
    ] = "",
    route: Annotated[str, typer.Option(help=ROUTE, show_default=False)] = "",
    form: _Form = "text",
) -> None:
    """Who holds how much of this prompt."""
    _check(form)
    answer = _ask("POST", f"{PATH}/who", read_request(request, tenant, route), url, token, form)
    _show(answer, Who, form, _who_text)


@app.command(
    epilog="Example: headwater index flush 10.0.0.1:8000   |   headwater index flush --all"
)
def flush(
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="Its id.", show_default=False)
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="All workers.")] = False,
    url: _Url = DEFAULT_URL,
    token: _Token = "",
    form: _Form = "text",
) -> None:
    """Forget what this gateway knows of a worker's cache; the cache itself stays as it is.

    A worker with an event feed is asked for its contents anew. Of others it is learned again.
    """
    _check(form)
    if every == bool(worker):
        raise ConfigError("WORKER", worker, "give either a worker's id or --all")
    body = msgspec.json.encode({"all": True} if every else {"worker": worker})
    answer = _ask("POST", f"{PATH}/flush", body, url, token, form)
    _show(answer, Flushed, form, _flushed_text)


def _check(form: str) -> None:
    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")


def _ask(method: str, path: str, body: bytes | None, url: str, token: str, form: str) -> bytes:
    _check(form)
    with make_client(url, token) as client:
        try:
            headers = {} if body is None else {"content-type": "application/json"}
            response = client.request(method, path, content=body, headers=headers)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            _fail(f"no gateway answers at {client.base_url}: {why} (--url names its admin address)")
    if not response.is_success:
        hint = " (--token gives the admin token)" if response.status_code in {401, 403} else ""
        _fail(f"the gateway answered {response.status_code}: {_message(response)}{hint}")
    return response.content


def _message(response: httpx.Response) -> str:
    try:
        return " ".join(str(response.json()["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return f"{response.reason_phrase}; is this the admin address?"


def _fail(message: str) -> NoReturn:
    typer.echo(f"headwater index: {message}", err=True)
    raise typer.Exit(1)


_Answer = TypeVar("_Answer", Stats, Who, Flushed)


def _show(answer: bytes, kind: type[_Answer], form: str, text: Any) -> None:
    try:
        decoded = msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        _fail(f"this is no answer of a gateway's admin listener: {error}")
    if form == "json":
        typer.echo(msgspec.json.format(answer, indent=2).decode())
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        typer.echo(text(decoded, colour), nl=False)


def _stats_text(told: Stats, colour: bool) -> str:
    from gateway.report.tables import Page

    page = Page(colour=colour)
    page.line(f"{told.entries:,} entries of at most {told.max_entries:,}", "bold")
    page.line(
        f"{told.seen_blocks:,} blocks seen served, {told.shared_prefixes:,} shared by several "
        "continuations"
    )
    if told.workers:
        page.line()
        head = ("worker", "trust", "blocks", "host", "tokens", "block", "last event", "why")
        page.table(head, [_stats_row(worker) for worker in told.workers], names=2)
    return page.text()


def _stats_row(worker: Contents) -> tuple[str, ...]:
    reason = worker.trust_reason
    if worker.learned_tokens:
        reason += f"; holds about {worker.learned_tokens:,} tokens"
    return (
        worker.id,
        worker.trust,
        f"{worker.blocks:,}",
        f"{worker.host_blocks:,}",
        f"{worker.tokens:,}",
        f"{worker.block_tokens}",
        "-" if worker.seq is None else f"{worker.seq:,}",
        reason,
    )


def _who_text(told: Who, colour: bool) -> str:
    from gateway.report.tables import Page

    page = Page(colour=colour)
    page.line(
        f"{told.request.get('model') or 'any model'}: {told.prompt_tokens:,} prompt tokens, "
        f"{told.matchable_tokens:,} can be reused at best"
    )
    if told.request.get("tokenizer_missing"):
        page.line(f"Tokens are not known exactly: {told.request['tokenizer_missing']}")
    if told.request.get("tenant_missing"):
        page.line(TENANT_MISSING)
    best = max((holder.tokens for holder in told.holders), default=0)
    if best:
        page.line(f"{told.holders[0].id} holds most: {best:,} tokens", "bold")
    elif told.seen_tokens:
        page.line(f"Nobody holds it now; {told.seen_tokens:,} tokens were served before", "bold")
    else:
        page.line("Nobody holds any of it, and it was never seen", "bold")
    page.line()
    rows = [
        (
            holder.id,
            holder.state,
            holder.trust,
            f"{holder.tokens:,}",
            f"{holder.host_tokens:,}",
            f"{holder.promised_tokens:,}",
        )
        for holder in told.holders
    ]
    page.table(("worker", "state", "trust", "tokens", "host", "promised"), rows, names=3)
    return page.text()


def _flushed_text(told: Flushed, colour: bool) -> str:
    del colour
    lines = [f"{worker}: {entries:,} entries forgotten" for worker, entries in told.flushed.items()]
    return "\n".join(lines or ["there is no worker"]) + "\n"
