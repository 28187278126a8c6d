"""The gateway's settings. Units are in the names; ``docs/configuration.md`` is made from this file.

Every key can be given as a flag (common ones), as ``HEADWATER_SECTION__KEY`` or in the TOML file.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.settings import (
    DeploymentConfig,
    GuardedListener,
    LogConfig,
    RedisConfig,
    TelemetryConfig,
    doc,
)

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class ListenConfig(GuardedListener, frozen=True, forbid_unknown_fields=True):
    """Where the gateway listens."""

    host: Annotated[str, doc("Address of the public listener.")] = "127.0.0.1"
    port: Annotated[Port, doc("Port of the public listener; 0 takes a free one.")] = 8000
    admin_host: Annotated[str, doc("Address of the admin listener.")] = "127.0.0.1"
    admin_port: Annotated[Port, doc("Port of the admin listener; 0 takes a free one.")] = 8001
    admin_token: Annotated[
        str, doc("Bearer token of the admin listener; required when it is not on loopback.")
    ] = ""
    max_body_mib: Annotated[Positive, doc("Largest request body, MiB; beyond it 413.")] = 32.0
    headers: Annotated[bool, doc("Send the x-headwater-* response headers.")] = True
    processes: Annotated[
        Count,
        doc("Gateway processes on the public port, each with its own core to use (Linux)."),
    ] = 1
    drain_s: Annotated[
        NonNegative, doc("After SIGTERM, how long running answers may take to finish.")
    ] = 30.0


EngineName = Literal["auto", "headwater", "vllm", "sglang", "llamacpp", "tgi", "openai"]


class StaticWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker with settings of its own: ``[[workers.static]]``."""

    url: str
    engine: EngineName = "auto"
    """``auto`` asks it."""
    events: str = ""
    """ZMQ address of its cache events (rank 0), e.g. ``tcp://gpu1:5557``; ``none``: it publishes
    none; empty: as it says itself, else ``workers.event_port`` of its host."""
    replay: str = ""
    """ZMQ address that repeats them; ``none`` and empty as with ``events``."""
    ranks: Count = 1
    """Data-parallel ranks; each publishes one port further."""
    topic: str = ""


class WorkersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which workers there are, and when one counts as gone."""

    urls: Annotated[tuple[str, ...], doc("Static list of worker base URLs.")] = ()
    static: Annotated[
        tuple[StaticWorker, ...],
        doc("Further workers, each with url, engine, events, replay, ranks and topic."),
    ] = ()
    engine: Annotated[
        EngineName, doc("What serves at addresses without an engine of their own; auto asks.")
    ] = "auto"
    event_port: Annotated[
        Port, doc("Where vLLM publishes cache events, unless told otherwise; 0: nowhere.")
    ] = 5557
    replay_port: Annotated[
        Port, doc("Where vLLM repeats them, unless told otherwise; 0: nowhere.")
    ] = 5558
    from_redis: Annotated[bool, doc("Also take workers that register themselves in Redis.")] = True
    health_interval_s: Annotated[Positive, doc("Time between two health probes.")] = 1.0
    health_timeout_s: Annotated[Positive, doc("A probe without an answer by then failed.")] = 2.0
    connect_timeout_s: Annotated[Positive, doc("Time to connect to a worker.")] = 2.0
    idle_timeout_s: Annotated[
        Positive,
        doc(
            "A worker that sends nothing for this long during an answer is cut. An answer that is "
            "no stream sends nothing until it is whole."
        ),
    ] = 300.0
    request_timeout_s: Annotated[Positive, doc("Longest time one request may take in all.")] = (
        3600.0
    )
    api_key: Annotated[str, doc("Bearer token sent to workers; empty sends none.")] = ""
    tls_ca: Annotated[
        str, doc("PEM file: the authority of https workers; empty: those that the system trusts.")
    ] = ""
    tls_cert: Annotated[str, doc("PEM file: the certificate shown to https workers.")] = ""
    tls_key: Annotated[str, doc("PEM file of its key.")] = ""
    http_client: Annotated[
        Literal["httptools", "aiohttp"],
        doc("Who speaks HTTP to workers: our own client on httptools, or aiohttp's (slower)."),
    ] = "httptools"


class DnsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names that resolve to many addresses, each of them a worker."""

    urls: Annotated[
        tuple[str, ...], doc("http://name:port; every address of the name is a worker.")
    ] = ()
    interval_s: Annotated[Positive, doc("Time between two questions to the resolver.")] = 5.0
    forget_s: Annotated[
        NonNegative, doc("An address that answers leave out is let go after this time.")
    ] = 15.0


class FileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A watched file with a list of workers."""

    path: Annotated[
        str, doc("TOML or JSON with `workers`: URLs, or tables of url and drain; empty: none.")
    ] = ""
    interval_s: Annotated[Positive, doc("Time between two looks whether it has changed.")] = 1.0


class KubernetesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """EndpointSlices of Kubernetes services. Needs the rights to list and watch them."""

    services: Annotated[tuple[str, ...], doc("Names of the services; empty: none.")] = ()
    namespace: Annotated[str, doc("Their namespace; empty is the gateway's own.")] = ""
    port: Annotated[
        str, doc("Name or number of the endpoints' port; empty: they have only one.")
    ] = ""
    scheme: Annotated[Literal["http", "https"], doc("How workers are spoken to.")] = "http"
    api: Annotated[str, doc("URL of the API server; empty is the one of the pod.")] = ""
    token_file: Annotated[str, doc("Bearer token, read again for each request.")] = (
        "/var/run/secrets/kubernetes.io/serviceaccount/token"
    )
    ca_file: Annotated[str, doc("Certificate of the API server's authority.")] = (
        "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    )


class DiscoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where workers come from, besides `workers.urls` and Redis. A list that fails removes none."""

    dns: DnsConfig = DnsConfig()
    file: FileConfig = FileConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()


class RoutingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker is chosen. The defaults need no tuning."""

    policy: Annotated[
        str,
        doc("A name of docs/policies.md, of an installed plug-in, or module:Class."),
    ] = "cost"
    options: Annotated[
        dict[str, dict[str, bool | int | float | str]],
        doc("Settings of single policies: policy name -> its table (docs/policies.md)."),
    ] = {}
    allow_policy_header: Annotated[bool, doc("Obey x-headwater-policy.")] = False
    retries: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc("Further workers tried while no byte of an answer has been sent."),
    ] = 2
    prefill_s_per_token: Annotated[
        Positive, doc("Assumed prefill seconds per token before anything was measured.")
    ] = 1e-4
    host_s_per_token: Annotated[
        Positive,
        doc("Assumed seconds to load a cached token from a worker's host memory, until it tells."),
    ] = 2e-5
    prefix_hash_tokens: Annotated[
        Count, doc("prefix_hash: how many leading tokens decide (rounded down to 16).")
    ] = 256
    prefix_hash_load_factor: Annotated[
        Annotated[float, msgspec.Meta(gt=1)],
        doc("prefix_hash: a worker takes at most this many times the mean load."),
    ] = 1.25
    index_max_blocks: Annotated[
        Count, doc("Cap on index entries of all workers; beyond it the least held ones go.")
    ] = 10_000_000
    ghost_blocks: Annotated[
        Count, doc("How many block keys are remembered to tell evicted from never seen.")
    ] = 1_000_000


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who waits in the gateway while no worker has room (docs/admission.md)."""

    inflight_per_worker: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc("A worker with so many requests, running or waiting there, has no room; 0: no bound."),
    ] = 512
    queue: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc("Requests that may wait in the gateway; beyond it the least urgent one gets 503."),
    ] = 1024
    queue_s: Annotated[Positive, doc("Longest time a request waits there; then it gets 503.")] = (
        30.0
    )
    oldest_every: Annotated[
        Count, doc("One in so many that go is the one that has waited longest, however urgent.")
    ] = 8
    hold_ms: Annotated[
        NonNegative,
        doc(
            "Keep a request back for at most this long while no worker would begin soon; 0: never."
        ),
    ] = 0.0
    hold_wait_ms: Annotated[
        Positive, doc("What soon means: prefill waiting on the worker is less than this.")
    ] = 100.0


class RenderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How prompts become tokens in the gateway."""

    tokenizers: Annotated[
        dict[str, str],
        doc("Model name -> folder or hub id of its tokenizer; else the worker's own is fetched."),
    ] = {}
    cache_mib: Annotated[Positive, doc("Memory of the segment cache, MiB.")] = 64.0
    offload_bytes: Annotated[
        Count, doc("New text beyond this many bytes is encoded off the event loop.")
    ] = 16_384


class LedgerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of records that ``headwater report`` reads."""

    dir: Annotated[str, doc("Folder for ledger files; empty keeps none.")] = ""
    rotate_mib: Annotated[Positive, doc("A file is closed at this size, MiB.")] = 64.0
    keep_files: Annotated[Count, doc("Older files beyond this number are removed.")] = 16
    trace: Annotated[
        bool,
        doc("Also keep the prompts' block keys, in DIR/trace: `headwater simulate` reads them."),
    ] = False
    decisions: Annotated[
        bool,
        doc(
            "With trace: also keep every candidate of each decision as it was, about 500 bytes per "
            "worker: `headwater replay` decides again on them."
        ),
    ] = False
    samples_per_minute: Annotated[
        NonNegative,
        doc(
            "Also keep up to this many requests a minute WITH THEIR TEXT, in DIR/samples: "
            "`headwater lint DIR` reads them. 0: no text is ever written."
        ),
    ] = 0.0
    stream_records: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc(
            "Also keep about this many records in a Redis stream that all gateways share; 0: none. "
            "Needs [redis] url and [deployment] secret."
        ),
    ] = 0


class TenancyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose requests are kept apart, and how much each tenant may ask. See docs/tenants.md."""

    keys_file: Annotated[
        str, doc("TOML file of API keys (SHA-256) with their tenants; beside listen.api_keys.")
    ] = ""
    isolation: Annotated[
        Literal["auto", "off"],
        doc("auto: once there are API keys, tenants share no cached prefixes; off: all share all."),
    ] = "auto"
    unisolated: Annotated[
        Literal["refuse", "allow"],
        doc(
            "Workers whose engine understands no cache salt, while tenants are to be kept apart: "
            "refuse = no request goes there; allow = tenants share that engine's cache."
        ),
    ] = "refuse"
    shared_prompts: Annotated[
        tuple[str, ...],
        doc(
            "Files of approved system prompts: tenants share their blocks and nothing behind them, "
            "where all workers of a model are our own."
        ),
    ] = ()
    requests_per_minute: Annotated[
        NonNegative, doc("Of a tenant without a limit of its own; 0 = no limit.")
    ] = 0.0
    prompt_tokens_per_minute: Annotated[
        NonNegative, doc("Of a tenant without a limit of its own; 0 = no limit.")
    ] = 0.0
    concurrent: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        doc("Requests of a tenant at a time; 0 = no limit."),
    ] = 0
    without_redis: Annotated[
        Literal["open", "closed"],
        doc(
            "Limits are counted in Redis for all gateways. While it is away: open = each gateway "
            "counts for itself; closed = requests of tenants with limits get 503."
        ),
    ] = "open"


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything ``headwater gateway`` can be told."""

    listen: ListenConfig = ListenConfig()
    workers: WorkersConfig = WorkersConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    render: RenderConfig = RenderConfig()
    ledger: LedgerConfig = LedgerConfig()
    tenancy: TenancyConfig = TenancyConfig()
    redis: RedisConfig = RedisConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
