"""``headwater explain --request ID``: why a request that has been served went where it did.

The gateway remembers the last requests with all their candidates; older ones are in the ledger,
which tells the reason and the worker that was most worth comparing with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import msgspec

from shared.errors import ConfigError, HeadwaterError

if TYPE_CHECKING:
    from gateway.report.tables import Page

PATH = "/admin/requests/"


class NotKnown(HeadwaterError):
    """Neither the gateway nor the ledger has the request; the message is one line."""


def look_up(client: httpx.Client, name: str, ledger: Sequence[str]) -> list[dict[str, Any]]:
    """The request's attempts, oldest first, as ``GET /admin/requests/{id}`` tells them.

    :raises NotKnown: nobody has it.
    """
    attempts, gateway = _from_gateway(client, name)
    if attempts:
        return attempts
    attempts, where = _from_ledger(ledger, name)
    if attempts:
        return attempts
    raise NotKnown(f"no request '{name}': {gateway}; {where}")


def _from_gateway(client: httpx.Client, name: str) -> tuple[list[dict[str, Any]], str]:
    try:
        response = client.get(PATH + quote(name, safe=""))
    except httpx.HTTPError as error:
        return [], f"no gateway answers at {client.base_url} ({str(error) or type(error).__name__})"
    if response.status_code == 404:
        return [], "it is not among the gateway's last ones"
    if not response.is_success:
        return [], f"the gateway answered {response.status_code}"
    try:
        found = msgspec.json.decode(response.content, type=dict[str, list[dict[str, Any]]])
        return found["attempts"], ""
    except (msgspec.DecodeError, RecursionError, KeyError):
        return [], f"{client.base_url} is no gateway's admin address"


def _from_ledger(ledger: Sequence[str], name: str) -> tuple[list[dict[str, Any]], str]:
    from gateway.dashboard.recent import from_records
    from gateway.ledger import default_dir
    from gateway.report.find import find

    where = list(ledger) or [
        os.environ.get("HEADWATER_LEDGER__DIR") or str(default_dir(os.environ))
    ]
    try:
        return from_records(find(where, name)), f"it is not in the ledger {', '.join(where)}"
    except ConfigError as error:
        if ledger:
            raise
        return [], f"there is no ledger to ask ({error})"


def show(attempts: Sequence[dict[str, Any]], form: str) -> str:
    """The attempts as text or JSON."""
    if form == "json":
        encoded = msgspec.json.encode({"attempts": attempts})
        return msgspec.json.format(encoded, indent=2).decode() + "\n"
    from gateway.report.tables import Page

    page = Page(colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    for number, attempt in enumerate(attempts):
        if number:
            page.line()
        _attempt(page, attempt)
    return page.text()


def _attempt(page: Page, attempt: dict[str, Any]) -> None:
    from gateway.report.tables import moment, seconds

    request = attempt["request"]
    own = f" ({request['client_id']})" if request.get("client_id") else ""
    head = f"{request['request_id']}{own}, {moment(request['at'])} UTC, {request['model']}"
    number = f", attempt {request['attempt']}" if request["attempt"] > 1 else ""
    went = (
        f"to {attempt['choice']} (policy {attempt['policy']})" if attempt["choice"] else "nowhere"
    )
    page.line(f"{head}{number}", "bold")
    page.line(f"Went {went}: {request['outcome']}, status {request['status']}")
    page.line(f"Why: {attempt['reason'] or 'not recorded (an older ledger)'}")
    page.line(
        f"First token after {seconds(request['ttft_s'])},"
        f" expected after {seconds(attempt['predicted_ttft_s'])};"
        f" decided after {seconds(request['decided_s'])}, ended after {seconds(request['total_s'])}"
    )
    if request["flow"]:
        parts = ", ".join(f"{tokens:,} {name}" for name, tokens in request["flow"].items())
        told = "" if request["reported"] else " (the engine did not tell what it reused)"
        page.line(f"Tokens: {parts}{told}")
    _candidates(page, attempt)


def _candidates(page: Page, attempt: dict[str, Any]) -> None:
    from gateway.report.tables import seconds

    workers = attempt["workers"]
    if not workers:
        return
    shown = seconds if attempt["policy"] == "cost" else (lambda value: f"{value or 0:.4g}")
    every = list(dict.fromkeys(name for worker in workers for name in worker["parts"]))
    terms = [name for name in every if any(worker["parts"].get(name) for worker in workers)]
    page.line()
    page.table(
        ("", "worker", "trust", "matched", "running", "cost", *terms),
        [
            (
                "->" if worker["id"] == attempt["choice"] else "",
                worker["id"],
                worker["trust"],
                f"{worker['matched_tokens']:,}",
                f"{worker['inflight']:,}",
                shown(worker["cost_s"]),
                *(shown(worker["parts"].get(name)) for name in terms),
            )
            for worker in workers
        ],
        names=3,
    )
    if attempt["candidates"] > len(workers):
        page.line(f"    the first {len(workers)} of {attempt['candidates']} candidates")
