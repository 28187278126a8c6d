"""Runs a gateway's background side against the deployment, and asks each worker a little more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
import msgspec

from gateway.build import Gateway
from gateway.config import GatewayConfig, LedgerConfig
from gateway.decision import WorkerStatus
from gateway.doctor.adminview import GatewayView
from gateway.doctor.checks import EVENTS_FLAG, Finding, Status, finding
from gateway.doctor.redisdoctor import examine_redis
from gateway.doctor.reuse import Reuse, try_reuse
from gateway.doctor.workerdoctor import fleet_findings, list_findings, worker_findings
from gateway.feeds.members import NOT_PROBED
from gateway.openers import worker_tls
from gateway.parity import NOT_PROVED
from gateway.routing.base import Trust, WorkerState
from shared.types import WorkerId

POLL_S = 0.05
EVENTS_S = 5.0
"""After the repeated prompt, how long its events may take to arrive."""
AT_ONCE = 8


async def examine(
    config: GatewayConfig, wait_s: float, view: GatewayView | None = None
) -> list[Finding]:
    """All findings.

    :param wait_s: how long workers may take to answer, to be proved and to be followed.
    :param view: a running gateway to be compared with.
    """
    found = [finding("config.valid", "configuration", Status.OK, "yes")]
    found += await examine_redis(config)
    if view is not None:
        found += await view.look()
        config = view.with_workers(config)
    # no ledger and no listener of its own: it may run beside the gateway itself
    quiet = msgspec.structs.replace(config, ledger=LedgerConfig())
    gateway = Gateway(quiet)
    try:
        await gateway.observe()
        await _until(lambda: _settled(gateway), wait_s)
        seen = await _ask(gateway, config)
        await _until(lambda: _followed(gateway), min(EVENTS_S, wait_s))
        workers = everybody(gateway)
        found += list_findings(gateway.feeds.lists())
        found += fleet_findings(workers)
        for status in workers:
            found += worker_findings(status, seen.get(status.id))
    finally:
        await gateway.close()
    if view is not None:
        found += view.compare(workers)
    return found


def everybody(gateway: Gateway) -> list[WorkerStatus]:
    """Workers, and addresses where none has answered."""
    known = gateway.router.workers(time.monotonic())
    names = {status.id for status in known}
    return known + [one for one in gateway.feeds.outsiders() if one.id not in names]


async def _until(done: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:  # noqa: ASYNC110 - pure parts can be asked only
        await asyncio.sleep(POLL_S)


def _settled(gateway: Gateway) -> bool:
    """Every list was read or is known to fail, and every worker was probed and proved."""
    if any(one.workers is None and one.fault == "not read yet" for one in gateway.feeds.lists()):
        return False
    stats = gateway.feeds.stats
    if stats.redis_configured and not stats.redis_up and not stats.redis_reason:
        return False
    workers = everybody(gateway)
    if not workers:
        return False  # some may register yet
    return all(_is_settled(status) for status in workers)


def _is_settled(status: WorkerStatus) -> bool:
    if status.state is WorkerState.DOWN:
        return status.reason != NOT_PROBED
    return status.parity_reason != NOT_PROVED


def _followed(gateway: Gateway) -> bool:
    workers = gateway.router.workers(time.monotonic())
    return all(
        w.trust is Trust.EXACT
        for w in workers
        if w.event_feed and w.state is WorkerState.READY and w.engine in EVENTS_FLAG
    )


async def _ask(gateway: Gateway, config: GatewayConfig) -> dict[WorkerId, Reuse]:
    """The repeated prompt, to every worker that takes requests."""
    key = config.workers.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    turn = asyncio.Semaphore(AT_ONCE)
    open_to = [w for w in gateway.router.workers(time.monotonic()) if w.state is WorkerState.READY]

    async def one(session: aiohttp.ClientSession, status: WorkerStatus) -> tuple[WorkerId, Reuse]:
        async with turn:
            return status.id, await try_reuse(session, status, headers)

    connector = aiohttp.TCPConnector(ssl=worker_tls(config.workers) or True)
    async with aiohttp.ClientSession(connector=connector) as session:
        return dict(await asyncio.gather(*(one(session, status) for status in open_to)))
