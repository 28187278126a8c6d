"""The worker's settings. Units are in the names; ``docs/configuration.md`` is made from here."""

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

Count = Annotated[int, msgspec.Meta(ge=1)]
Whole = Annotated[int, msgspec.Meta(ge=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, and how it is held."""

    path: Annotated[
        str,
        doc(
            "Directory, GGUF file or hub id; 'smollm2' is the small default model, 'fake' needs no "
            "torch and answers deterministically."
        ),
    ] = "smollm2"
    served_names: Annotated[
        tuple[str, ...], doc("Names it answers to; the first is the canonical one.")
    ] = ()
    device: Annotated[str, doc("auto, cpu, or cuda:0.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"],
        doc("Weights and KV; auto is float32 on CPU and bfloat16 on CUDA."),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8"],
        doc(
            "int8 holds the linear layers in int8 and rounds activations per token: faster, a "
            "little less exact; on CUDA it needs torchao."
        ),
    ] = "none"
    threads: Annotated[
        Whole, doc("CPU threads of torch; 0 takes all cores, or those of model.pin.")
    ] = 0
    pin: Annotated[
        str,
        doc(
            "Cores the engine's threads keep to (Linux), such as 0-3,8, or none; the HTTP side "
            "is not bound."
        ),
    ] = "none"
    cpu_kernels: Annotated[
        bool,
        doc(
            "On a CPU in float32, compile small kernels (products with few rows, attention of "
            "decodes) with the C compiler that is there; without one torch's own functions serve."
        ),
    ] = True
    cache_dir: Annotated[
        str, doc("Folder for converted models; empty is XDG_CACHE_HOME/headwater.")
    ] = ""
    max_model_len: Annotated[Whole, doc("Longest prompt + answer; 0 takes the model's own.")] = 0
    generation_config: Annotated[
        Literal["auto", "none"],
        doc(
            "Sampling fields that a request leaves out: auto takes those of the model's own "
            "generation_config.json, none OpenAI's defaults."
        ),
    ] = "auto"
    lora_modules: Annotated[
        tuple[str, ...], doc("LoRA adapters to load at start, each NAME=DIR; see lora.md.")
    ] = ()
    max_loras: Annotated[
        Whole, doc("Adapters served at the same time, hot-loaded ones included; 0 = none.")
    ] = 8
    max_lora_rank: Annotated[Count, doc("Largest rank of an adapter.")] = 64
    cuda_graphs: Annotated[
        bool, doc("Replay decode steps as recorded CUDA graphs; refused elsewhere than on CUDA.")
    ] = False
    compile: Annotated[
        bool,
        doc(
            "Let torch.compile fuse the model's small operations. Loading takes minutes longer and "
            "asks for a C++ compiler (CPU) or Triton (CUDA); refused where it does not work."
        ),
    ] = False


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The paged KV pool."""

    kv_blocks: Annotated[
        Whole, doc("Number of KV blocks; 0 takes what fits in a share of free memory.")
    ] = 0
    block_size: Annotated[Count, doc("Tokens per block.")] = 16
    prefix_cache: Annotated[bool, doc("Reuse KV of prompts seen before.")] = True
    host_blocks: Annotated[
        Whole,
        doc("Blocks of host memory for what the KV pool evicts, a second tier; 0 takes host_gib."),
    ] = 0
    host_gib: Annotated[
        NonNegative, doc("The same in GiB; 0, and no host_blocks, is no second tier.")
    ] = 0.0


class ScheduleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one step may hold."""

    max_batch_tokens: Annotated[Count, doc("Token budget of one step.")] = 512
    max_step_ms: Annotated[
        NonNegative,
        doc("Time budget of a step that has decoding neighbours; 0 = off (auto on CPU: 250)."),
    ] = 250.0
    max_running: Annotated[Count, doc("Sequences that run at the same time.")] = 64
    max_waiting: Annotated[Count, doc("Requests that may wait; beyond it 503.")] = 1024


class FakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Modelled speed of the worker without torch (``model.path = "fake"``)."""

    prefill_us_per_token: Annotated[NonNegative, doc("Modelled prefill time per token.")] = 150.0
    decode_ms_per_step: Annotated[NonNegative, doc("Modelled time of one decode step.")] = 5.0
    copy_us_per_block: Annotated[
        NonNegative, doc("Modelled time to copy a block between device and host memory.")
    ] = 100.0


class ServeConfig(GuardedListener, frozen=True, forbid_unknown_fields=True):
    """Listeners and life cycle."""

    host: Annotated[str, doc("Address of the public listener.")] = "127.0.0.1"
    port: Annotated[Port, doc("Port of the public listener; 0 takes a free one.")] = 8100
    admin_host: Annotated[str, doc("Address of the admin listener.")] = "127.0.0.1"
    admin_port: Annotated[Port, doc("Port of the admin listener; 0 takes a free one.")] = 0
    admin_token: Annotated[
        str, doc("Bearer token of the admin listener; required when it is not on loopback.")
    ] = ""
    advertise_url: Annotated[
        str, doc("Base URL under which gateways reach this worker; empty is http(s)://HOST:PORT.")
    ] = ""
    worker_id: Annotated[str, doc("Name of this worker; empty is HOST:PORT.")] = ""
    drain_s: Annotated[
        NonNegative, doc("After SIGTERM, how long running answers may take to finish.")
    ] = 30.0
    max_body_mib: Annotated[
        Annotated[float, msgspec.Meta(gt=0)], doc("Largest request body, MiB.")
    ] = 32.0


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything ``headwater worker`` can be told."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    fake: FakeConfig = FakeConfig()
    serve: ServeConfig = ServeConfig()
    redis: RedisConfig = RedisConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
