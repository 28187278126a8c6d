"""``headwater explain``: how a gateway would route a request now, and why."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer

from gateway.discovery.base import holds_space
from shared.errors import ConfigError, HeadwaterError
from shared.jsonsplice import apply, set_member

PATH = "/admin/explain"
DEFAULT_URL = "http://127.0.0.1:8001"
FORMATS = ("text", "json")
ROUTES = ("chat", "completions", "responses", "messages")
BODY = "The body of a chat, completion, response or message; - reads standard input."
ROUTE = (
    f"Where it would be sent: {', '.join(ROUTES)}. Told from its fields if left out; a message "
    '(Anthropic\'s) without "system" looks like a chat.'
)
TENANT_MISSING = "Tenants are kept apart, so nothing is found: --tenant says whose request it is"

app = typer.Typer()


class ExplainFailed(HeadwaterError):
    """The gateway gave no explanation; the message is one line."""


class ExplainedWorker(msgspec.Struct, frozen=True):
    """One worker in the order of the ranking; ``parts`` add up to ``cost_s``.

    Both are seconds for the policy ``cost``; others only order by them.
    """

    id: str
    state: str = ""
    trust: str = ""
    matched_tokens: int = 0
    host_tokens: int = 0
    """The part of them in the worker's host memory."""
    cost_s: float | None = None
    parts: dict[str, float] = {}
    inflight: int = 0


class Explanation(msgspec.Struct, frozen=True):
    """The answer of ``POST /admin/explain``; what else it holds, ``--format json`` shows."""

    request: dict[str, Any]
    """``model``, ``prompt_tokens``, ``blocks`` and what else the gateway tells."""
    policy: str = ""
    choice: str | None = None
    reason: str = ""
    reject: dict[str, Any] | None = None
    predicted_ttft_s: float | None = None
    workers: list[ExplainedWorker] = []


@app.command(
    epilog="Example: headwater explain request.json   |   "
    "headwater explain --request req-0f3a   |   "
    'echo \'{"messages": [{"role": "user", "content": "Hi"}]}\' | headwater explain -'
)
def explain(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST.json",
            help=BODY,
            show_default=False,
        ),
    ] = "",
    served: Annotated[
        str,
        typer.Option(
            "--request",
            metavar="ID",
            help="Instead: a request that has been served, by its id (x-request-id). The gateway "
            "is asked first, then the ledger.",
            show_default=False,
        ),
    ] = "",
    ledger: Annotated[
        list[str] | None,
        typer.Option(
            help="With --request: ledger files, folders or patterns to look in; else as for "
            "`headwater report`.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="The gateway's admin address.")] = DEFAULT_URL,
    token: Annotated[
        str,
        typer.Option(
            help="The admin token, if the gateway wants one.",
            envvar="HEADWATER_LISTEN__ADMIN_TOKEN",
            show_default=False,
            show_envvar=True,
        ),
    ] = "",
    tenant: Annotated[
        str,
        typer.Option(
            help="Whose request it would be: the name of a tenant. Where tenants are kept apart "
            "nothing is found without it.",
            show_default=False,
        ),
    ] = "",
    route: Annotated[str, typer.Option(help=ROUTE, show_default=False)] = "",
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """How this request would be routed now: who holds how much, what each costs, and the choice.

    With --request ID: why a request that has been served went where it did.
    """
    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    if bool(request) == bool(served):
        raise ConfigError("REQUEST", request, "give either a request's body or --request ID")
    if served:
        _explain_served(served, ledger or [], url, token, form)
        return
    body = read_request(request, tenant, route)
    with make_client(url, token) as client:
        try:
            answer = ask(client, body)
            explanation = decode(answer)
        except ExplainFailed as error:
            typer.echo(f"headwater explain: {error}", err=True)
            raise typer.Exit(1) from error
    if form == "json":
        typer.echo(msgspec.json.format(answer, indent=2).decode())
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        typer.echo(render(explanation, colour=colour), nl=False)


def _explain_served(name: str, ledger: list[str], url: str, token: str, form: str) -> None:
    from gateway.cli.explainpast import NotKnown, look_up, show

    with make_client(url, token) as client:
        try:
            typer.echo(show(look_up(client, name, ledger), form), nl=False)
        except NotKnown as error:
            typer.echo(f"headwater explain: {error}", err=True)
            raise typer.Exit(1) from error


def read_request(source: str, tenant: str = "", route: str = "") -> bytes:
    """The bytes of a request body as they stand in a file, or on standard input for ``-``, with
    the name of the tenant who is to ask it and where it would be sent.

    :raises ConfigError: it cannot be read, or is no request that is routed by its prompt.
    """
    if route and route not in ROUTES:
        raise ConfigError("--route", route, f"is none of {', '.join(ROUTES)}")
    try:
        body = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError("REQUEST", source, f"cannot be read: {error.strerror}") from error
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("REQUEST", source, f"is no JSON: {error}") from error
    if not isinstance(fields, dict) or not fields.keys() & _PROMPTS:
        names = " or ".join(f'"{name}"' for name in _PROMPTS)
        raise ConfigError("REQUEST", source, f"is no request: a JSON object with {names} is needed")
    for name, value in (("tenant", tenant), ("route", route)):
        if value:
            body = apply(body, set_member(body, name, msgspec.json.encode(value)))
    return body


_PROMPTS = ("messages", "prompt", "input", "previous_response_id")


def checked_url(url: str, example: str) -> httpx.URL:
    """What ``--url`` says, if anything can be asked there.

    :raises ConfigError: not a URL.
    """
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError("--url", url, str(error)) from error
    good = base.scheme in {"http", "https"} and base.host and not holds_space(url)
    if not good or not (base.port is None or 0 < base.port < 2**16):
        raise ConfigError("--url", url, f"is no http:// or https:// URL, such as {example}")
    return base


def make_client(url: str, token: str) -> httpx.Client:
    """A client for the admin listener; proxies of the environment are for the outside world.

    :raises ConfigError: not a URL.
    """
    base = checked_url(url, DEFAULT_URL)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=base, headers=headers, timeout=30.0, trust_env=False)


def ask(client: httpx.Client, body: bytes) -> bytes:
    """The gateway's answer, JSON.

    :raises ExplainFailed: it cannot be reached or refuses.
    """
    try:
        response = client.post(PATH, content=body, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ExplainFailed(
            f"no gateway answers at {client.base_url}: {reason} (--url names its admin address)"
        ) from error
    if response.is_success:
        return response.content
    hint = " (--token gives the admin token)" if response.status_code in {401, 403} else ""
    raise ExplainFailed(f"the gateway answered {response.status_code}: {_message(response)}{hint}")


def _message(response: httpx.Response) -> str:
    """What an OpenAI-style error body says, on one line; without one, the status' own name."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{response.reason_phrase}; is this the admin address?"
    return " ".join(str(message).split())


def decode(answer: bytes) -> Explanation:
    """The typed view of an answer.

    :raises ExplainFailed: something else answered.
    """
    try:
        return msgspec.json.decode(answer, type=Explanation)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ExplainFailed(f"this is no answer of a gateway's admin listener: {error}") from error


def render(explanation: Explanation, *, colour: bool = False) -> str:
    """The explanation in at most 100 columns."""
    from gateway.report.tables import Page, seconds

    page = Page(colour=colour)
    request = explanation.request
    known = [f"{request[name]} {label}" for name, label in _SIZES if request.get(name)]
    page.line(f"{request.get('model') or 'any model'}: {', '.join(known) or 'size not known'}")
    if "previous_worker" in request:
        page.line(_went_on(request["previous_worker"]))
    if request.get("tokenizer_missing"):
        page.line(f"Tokens are not known exactly: {request['tokenizer_missing']}")
    if request.get("tenant_missing"):
        page.line(TENANT_MISSING)
    if explanation.reject is not None:
        message = explanation.reject.get("message") or explanation.reason
        page.line(f"Would be rejected: {message}", "bold")
    elif explanation.choice is None:
        page.line(f"No worker would be chosen: {explanation.reason}", "bold")
    else:
        page.line(f"Would go to {explanation.choice} (policy {explanation.policy})", "bold")
        if explanation.predicted_ttft_s is not None:
            page.line(f"First token expected after {seconds(explanation.predicted_ttft_s)}")
    if explanation.reason and explanation.choice is not None:
        page.line(f"Why: {explanation.reason}")
    if explanation.workers:
        page.line()
        every = list(dict.fromkeys(name for w in explanation.workers for name in w.parts))
        terms = [name for name in every if any(w.parts.get(name) for w in explanation.workers)]
        head = ("", "worker", "state", "trust", "matched", "running", "cost")
        page.table((*head, *terms), _rows(explanation, terms), names=4)
        idle = [name for name in every if name not in terms]
        if idle:
            page.line(f"    nothing for: {', '.join(idle)}")
    return page.text()


def _went_on(giver: str | None) -> str:
    if giver is None:
        return "Nobody knows who gave the response that it goes on from"
    return f"Goes on from a response that {giver} gave"


_SIZES = (("prompt_tokens", "prompt tokens"), ("blocks", "blocks"))


def _rows(explanation: Explanation, terms: list[str]) -> list[tuple[str, ...]]:
    from gateway.report.tables import seconds

    prompt = explanation.request.get("prompt_tokens")
    shown = seconds if explanation.policy == "cost" else _plain
    rows = []
    for worker in explanation.workers:
        matched = f"{worker.matched_tokens:,}"
        if isinstance(prompt, int) and prompt > 0:
            matched += f" ({100 * worker.matched_tokens / prompt:.0f} %)"
        if worker.host_tokens:
            matched += f", {worker.host_tokens:,} host"
        parts = (shown(worker.parts.get(name)) for name in terms)
        rows.append(
            (
                "->" if worker.id == explanation.choice else "",
                worker.id,
                worker.state,
                worker.trust,
                matched,
                f"{worker.inflight:,}",
                shown(worker.cost_s),
                *parts,
            )
        )
    return rows


def _plain(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:.4g}"
