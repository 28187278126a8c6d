"""What a gateway's background side has seen of each worker, as findings. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gateway.decision import WorkerStatus
from gateway.doctor.checks import (
    CACHE_FLAG,
    EVENTS_FLAG,
    LOAD_FLAG,
    REPORT_FLAG,
    Finding,
    Status,
    finding,
)
from gateway.doctor.reuse import Reuse
from gateway.feeds.sources import SourceState
from gateway.parity import Verdict
from gateway.routing.base import Trust, WorkerState

LARGE_BLOCK = 256
SKEW_S = 5.0
NO_ROUTE = "let the gateway reach the routes that tokenise, or use a release that has them"


def subject_of(status: WorkerStatus) -> str:
    """How a worker is called in findings."""
    return f"worker {status.id}"


def list_findings(lists: Sequence[SourceState]) -> list[Finding]:
    """One for each list that is followed."""
    found = []
    for one in lists:
        subject, count = f"discovery.{one.source}", one.workers
        if one.fault:
            found.append(finding("list.read", subject, Status.FAILED, one.fault))
        elif not count:
            detail = "it can be read, and names nobody"
            found.append(finding("list.read", subject, Status.WARNING, detail))
        else:
            found.append(finding("list.read", subject, Status.OK, f"{count} workers"))
    return found


def fleet_findings(workers: Sequence[WorkerStatus]) -> list[Finding]:
    """What concerns all workers together."""
    if not workers:
        return [finding("fleet.workers", "fleet", Status.FAILED, "no worker is known")]
    alive = [w for w in workers if w.state is not WorkerState.DOWN]
    status = Status.OK if alive else Status.FAILED
    detail = f"{len(workers)} known, {len(alive)} answer"
    fix = None if alive else "see the reasons at each worker"
    return [finding("fleet.workers", "fleet", status, detail, fix), *model_findings(alive)]


def model_findings(workers: Sequence[WorkerStatus]) -> list[Finding]:
    """One for each model whose workers could disagree."""
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        if worker.models and worker.tokenizer:
            kinds[worker.models[0]][worker.tokenizer].append(worker.id)
    found = []
    for model, by_tokenizer in sorted(kinds.items()):
        if len(by_tokenizer) > 1:
            groups = " / ".join(", ".join(names) for names in by_tokenizer.values())
            detail = f"{len(by_tokenizer)} different tokenizers: {groups}"
            found.append(finding("fleet.models", model, Status.FAILED, detail))
        else:
            [names] = by_tokenizer.values()
            detail = f"one tokenizer on {len(names)} workers"
            found.append(finding("fleet.models", model, Status.OK, detail))
    return found


def worker_findings(status: WorkerStatus, reuse: Reuse | None) -> list[Finding]:
    """All about one worker. ``reuse``: None: it was not asked."""
    subject = subject_of(status)
    if not status.engine:  # it has never said who it is
        return [finding("worker.reachable", subject, Status.FAILED, status.reason)]
    what = f"{status.engine}, at {status.url}"
    found = [finding("worker.reachable", subject, Status.OK, what)]
    if status.state is WorkerState.READY:
        found.append(finding("worker.ready", subject, Status.OK, "yes"))
    else:
        kind = Status.WARNING if status.state is WorkerState.DRAINING else Status.FAILED
        detail = status.reason or status.state.value
        found.append(finding("worker.ready", subject, kind, detail))
    found += [_models(status), _tokens(status), _blocks(status), _events(status)]
    found.append(_load(status))
    if reuse is not None:
        found += [_reports(status, reuse), _clock(status, reuse)]
    return found


def _models(status: WorkerStatus) -> Finding:
    names = ", ".join(status.models) or "none"
    if status.adapters:
        names += f"; adapters: {', '.join(status.adapters)}"
    kind = Status.OK if status.models else Status.FAILED
    return finding("worker.models", subject_of(status), kind, names)


def _tokens(status: WorkerStatus) -> Finding:
    subject = subject_of(status)
    if status.parity is Verdict.EQUAL:
        return finding("worker.tokens", subject, Status.OK, "equal on the probe prompts")
    if status.parity is Verdict.DIFFERENT:
        fix = status.parity_fix or None
        return finding("worker.tokens", subject, Status.FAILED, status.parity_reason, fix)
    fix = status.parity_fix or NO_ROUTE
    return finding("worker.tokens", subject, Status.WARNING, status.parity_reason, fix)


def _blocks(status: WorkerStatus) -> Finding:
    subject, size = subject_of(status), status.block_size
    if size == 1 and status.engine != "headwater":
        detail = "1 token: each event costs as much as one of 16, and the gateway's memory too"
        return finding("worker.blocks", subject, Status.WARNING, detail)
    if size > LARGE_BLOCK:
        detail = f"{size} tokens: prompts that share less have nothing in common"
        return finding("worker.blocks", subject, Status.WARNING, detail)
    return finding("worker.blocks", subject, Status.OK, f"{size} tokens")


def _events(status: WorkerStatus) -> Finding:
    subject, flag = subject_of(status), EVENTS_FLAG.get(status.engine)
    if status.trust is Trust.EXACT:
        detail = f"followed: {status.trust_reason}" if status.trust_reason else "followed"
        return finding("worker.events", subject, Status.OK, detail)
    detail = f"{status.trust}: {status.trust_reason}"
    if flag is None:
        return finding(
            "worker.events", subject, Status.OK, f"this engine publishes none ({detail})"
        )
    if status.parity is Verdict.DIFFERENT:
        return finding("worker.events", subject, Status.WARNING, detail, "see worker.tokens")
    kind = Status.FAILED if status.event_feed else Status.WARNING
    return finding("worker.events", subject, kind, detail, flag)


def _load(status: WorkerStatus) -> Finding:
    subject = subject_of(status)
    if status.load_age_s is not None:
        detail = f"{status.running} running, {status.waiting} waiting"
        return finding("worker.load", subject, Status.OK, detail)
    detail = "only what is routed there is known of its load"
    flag = LOAD_FLAG.get(status.engine)
    if flag is None:
        return finding("worker.load", subject, Status.OK, f"this engine does not tell: {detail}")
    return finding("worker.load", subject, Status.WARNING, detail, flag)


def _reports(status: WorkerStatus, reuse: Reuse) -> Finding:
    subject = subject_of(status)
    if reuse.fault:
        return finding(
            "worker.reports", subject, Status.FAILED, reuse.fault, "see the worker's log"
        )
    if reuse.cached_tokens:
        detail = f"{reuse.cached_tokens} of {reuse.prompt_tokens} tokens of a repeated prompt"
        return finding("worker.reports", subject, Status.OK, detail)
    known = status.engine in EVENTS_FLAG
    kind = Status.FAILED if known else Status.WARNING
    # SGLang leaves the field out when it would be 0
    if reuse.cached_tokens is None:
        detail = "it does not report cached_tokens"
        fix = REPORT_FLAG.get(status.engine, "switch on prompt_tokens_details in its usage")
    else:
        detail = "it reused nothing of a repeated prompt"
        fix = CACHE_FLAG.get(status.engine, "switch on its prefix cache")
    return finding("worker.reports", subject, kind, detail, fix)


def _clock(status: WorkerStatus, reuse: Reuse) -> Finding:
    subject = subject_of(status)
    if reuse.skew_s is None:
        return finding("worker.clock", subject, Status.SKIPPED, "it sends no Date")
    if abs(reuse.skew_s) > SKEW_S:
        detail = f"{reuse.skew_s:+.0f} s; routing does not need it, templates with a date do"
        return finding("worker.clock", subject, Status.WARNING, detail)
    return finding("worker.clock", subject, Status.OK, f"within {SKEW_S:.0f} s")
