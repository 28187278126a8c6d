"""All checks, what each means, and what to do when it fails. Pure; ``docs/doctor.md`` is made here.

Fixes name the flag that the engine is to be started with.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Result of one check."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not be looked at: the detail says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of question."""

    id: str
    asks: str
    fix: str
    """What to do in general; a finding may say it more exactly."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check on one subject."""

    check: str
    subject: str
    status: Status
    detail: str
    fix: str = ""
    """Empty if there is nothing to do."""


EVENTS_FLAG = {
    "vllm": (
        'start vLLM with --kv-events-config \'{"enable_kv_cache_events": true, '
        '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\', '
        "and let the gateway reach these ports"
    ),
    "sglang": (
        'start SGLang with --kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558"}\' --page-size 16, and let the gateway reach these ports'
    ),
    "headwater": "let the gateway reach the worker's /headwater/events, or both the same Redis",
}
REPORT_FLAG = {
    "vllm": "start vLLM with --enable-prompt-tokens-details",
    "sglang": "start SGLang with --enable-cache-report",
    "llamacpp": "use a llama-server that tells usage.prompt_tokens_details.cached_tokens",
    "tgi": "TGI reports no cached tokens: it can be balanced by load only",
}
CACHE_FLAG = {
    "vllm": "start vLLM with --enable-prefix-caching (or without --no-enable-prefix-caching)",
    "sglang": "start SGLang without --disable-radix-cache",
    "llamacpp": "start llama-server without --no-cache-prompt",
    "headwater": "start the worker without --no-prefix-cache",
}

LOAD_FLAG = {
    "vllm": "let the gateway reach the engine's /metrics",
    "sglang": "start SGLang with --enable-metrics",
    "llamacpp": "start llama-server with --metrics and --slots",
    "tgi": "let the gateway reach the engine's /metrics",
    "headwater": "let the gateway reach the worker's /headwater/load",
}

CHECKS: tuple[Check, ...] = (
    Check(
        "config.valid",
        "Can the configuration be read, and could a gateway start with it?",
        "correct the key that is named; docs/configuration.md lists all",
    ),
    Check(
        "redis.reachable",
        "Does Redis answer, as a master?",
        "correct [redis] url, or the network; without Redis the gateways follow workers directly",
    ),
    Check("redis.version", "Is it Redis 6.2 or later, or Valkey?", "update the server"),
    Check(
        "redis.memory",
        "Does it keep what is written (maxmemory-policy)?",
        "CONFIG SET maxmemory-policy volatile-ttl (every key of the index has a lifetime)",
    ),
    Check(
        "redis.rights",
        "May this user run the commands that a gateway needs, on the deployment's keys?",
        "give the user the rights in docs/redis.md (ACL SETUSER ...)",
    ),
    Check(
        "redis.latency",
        "How long does a command take, beside [redis] timeout_ms?",
        "move Redis nearer, or raise [redis] timeout_ms",
    ),
    Check(
        "redis.keyspace",
        "Who has registered under this deployment's name?",
        "give gateways and workers the same [deployment] name and [redis] url",
    ),
    Check(
        "list.read",
        "Can each list of workers (DNS, file, Kubernetes) be read, and whom does it name?",
        "see docs/discovery.md",
    ),
    Check(
        "fleet.workers",
        "Is there any worker?",
        "name some: --workers URL,..., [discovery.*], or --redis for those that register",
    ),
    Check(
        "fleet.models",
        "Do the workers of a model agree on its tokenizer?",
        "serve the same files under one model name, or give the models different names",
    ),
    Check("worker.reachable", "Does it answer, and who is it?", "start it, or correct its URL"),
    Check("worker.ready", "Can it take requests?", "see the reason; it may still be loading"),
    Check("worker.models", "Which models and adapters does it serve?", "load a model"),
    Check(
        "worker.tokens",
        "Does it make the same tokens of probe prompts as the gateway?",
        "give both the same tokenizer and chat template: [render] tokenizers",
    ),
    Check(
        "worker.blocks",
        "How many tokens has a block of its KV cache?",
        "SGLang: --page-size 16; vLLM: --block-size 16",
    ),
    Check(
        "worker.events",
        "Are its cache events followed?",
        "; ".join(EVENTS_FLAG[name] for name in ("vllm", "sglang")),
    ),
    Check(
        "worker.load",
        "Does it say how busy it is?",
        "; ".join(LOAD_FLAG[name] for name in ("sglang", "llamacpp")),
    ),
    Check(
        "worker.reports",
        "Does it say how much of a repeated prompt came from its cache?",
        "; ".join(REPORT_FLAG[name] for name in ("vllm", "sglang")),
    ),
    Check(
        "worker.clock",
        "Does its clock agree with the one here?",
        "run a time service (chrony, systemd-timesyncd) on both",
    ),
    Check(
        "gateway.reachable",
        "Does the running gateway's admin listener answer (--url)?",
        "give its admin address and token; off loopback it needs [listen] admin_host",
    ),
    Check(
        "gateway.view",
        "Does the running gateway see its workers as well as the doctor does?",
        "look at the reason; network rules may differ between here and there",
    ),
)

_BY_ID = {check.id: check for check in CHECKS}


def finding(
    check: str, subject: str, status: Status, detail: str, fix: str | None = None
) -> Finding:
    """A finding; without a fix of its own a failed one or a warning gets its check's.

    :raises KeyError: there is no such check.
    """
    known = _BY_ID[check]
    if status in (Status.OK, Status.SKIPPED):
        return Finding(check, subject, status, detail, fix or "")
    return Finding(check, subject, status, detail, known.fix if fix is None else fix)


def failed(findings: list[Finding]) -> bool:
    """Whether the command is to exit with 1."""
    return any(one.status is Status.FAILED for one in findings)
