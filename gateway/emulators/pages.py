"""What the emulated engines say about themselves, each in its own words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gateway.emulators.cache import SlotCache

if TYPE_CHECKING:
    from gateway.emulators.emulator import Emulator

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tgi": "Hugging Face"}


def models(emulator: Emulator) -> dict[str, Any]:
    """``GET /v1/models``."""
    settings = emulator.settings
    card: dict[str, Any] = {
        "id": settings.model,
        "object": "model",
        "created": 0,
        "owned_by": OWNERS[settings.engine],
    }
    if settings.engine in ("vllm", "sglang"):
        card["max_model_len"] = settings.context
    return {"object": "list", "data": [card]}


def tokens(emulator: Emulator, ids: list[int]) -> Any:
    """Answer of ``POST /tokenize``."""
    engine = emulator.settings.engine
    if engine == "llamacpp":
        return {"tokens": ids}
    if engine == "tgi":
        return [{"id": one, "text": "", "start": 0, "stop": 0} for one in ids]
    return {"tokens": ids, "count": len(ids), "max_model_len": emulator.settings.context}


def usage(emulator: Emulator, prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """The members of an answer that tell what was counted."""
    settings = emulator.settings
    counted: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    details = {"cached_tokens": cached}
    if settings.engine == "llamacpp":
        timings = {"cache_n": cached, "prompt_n": prompt - cached, "predicted_n": completion}
        return {"usage": {**counted, "prompt_tokens_details": details}, "timings": timings}
    if settings.engine == "sglang":
        counted["prompt_tokens_details"] = details if settings.report and cached else None
    elif settings.engine == "vllm":
        counted["prompt_tokens_details"] = details if settings.report else None
    return {"usage": counted}


# --- metrics -------------------------------------------------------------------------------------


def _vllm(emulator: Emulator) -> str:
    c, settings = emulator.counters, emulator.settings
    label = f'{{engine="0",model_name="{settings.model}"}}'
    share = emulator.cache.used_tokens / emulator.cache.total_tokens
    info = f'block_size="{settings.block_size}",enable_prefix_caching="True"'
    return "\n".join(
        [
            f"vllm:num_requests_running{label} {c.running:.1f}",
            f"vllm:num_requests_waiting{label} {c.waiting:.1f}",
            f"vllm:kv_cache_usage_perc{label} {share}",
            f"vllm:prefix_cache_queries_total{label} {c.prompt_tokens:.1f}",
            f"vllm:prefix_cache_hits_total{label} {c.cached_tokens:.1f}",
            f"vllm:prompt_tokens_total{label} {c.prompt_tokens:.1f}",
            f"vllm:generation_tokens_total{label} {c.output_tokens:.1f}",
            f'vllm:cache_config_info{{engine="0",{info},num_gpu_blocks="{settings.blocks}"}} 1.0',
            f"process_start_time_seconds {emulator.started}",
            "",
        ]
    )


def _sglang(emulator: Emulator) -> str:
    c, cache = emulator.counters, emulator.cache
    label = f'{{model_name="{emulator.settings.model}"}}'
    return "\n".join(
        [
            f"sglang:num_running_reqs{label} {c.running:.1f}",
            f"sglang:num_queue_reqs{label} {c.waiting:.1f}",
            f"sglang:num_used_tokens{label} {cache.used_tokens:.1f}",
            f"sglang:token_usage{label} {cache.used_tokens / cache.total_tokens}",
            f"sglang:max_total_num_tokens{label} {cache.total_tokens:.1f}",
            f"sglang:prompt_tokens_total{label} {c.prompt_tokens:.1f}",
            f"sglang:cached_tokens_total{label} {c.cached_tokens:.1f}",
            f"sglang:generation_tokens_total{label} {c.output_tokens:.1f}",
            "",
        ]
    )


def _llamacpp(emulator: Emulator) -> str:
    c = emulator.counters
    return "\n".join(
        [
            f"llamacpp:prompt_tokens_total {c.prompt_tokens - c.cached_tokens}",
            f"llamacpp:tokens_predicted_total {c.output_tokens}",
            f"llamacpp:requests_processing {c.running}",
            f"llamacpp:requests_deferred {c.waiting}",
            "",
        ]
    )


def _tgi(emulator: Emulator) -> str:
    c = emulator.counters
    return "\n".join(
        [
            f"tgi_queue_size {c.waiting}",
            f"tgi_batch_current_size {c.running}",
            f"tgi_request_count {c.requests}",
            "",
        ]
    )


METRICS: Mapping[str, Callable[[Emulator], str]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llamacpp": _llamacpp,
    "tgi": _tgi,
}


# --- pages that only one engine has --------------------------------------------------------------


def _server_info(emulator: Emulator) -> dict[str, Any]:
    settings, publisher = emulator.settings, emulator.publisher
    told: dict[str, Any] = {
        "version": settings.release,
        "page_size": settings.block_size,
        "disable_radix_cache": False,
        "context_length": settings.context,
        "max_total_num_tokens": emulator.cache.total_tokens,
        "kv_events": None,
    }
    if publisher is not None:
        told["kv_events"] = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": publisher.port,
            "topic": "",
            "block_size": settings.block_size,
            "dp_size": 1,
        }
        if publisher.replay_port:
            told["kv_events"]["replay_endpoint_port_base"] = publisher.replay_port
    return told


def _slots(emulator: Emulator) -> list[dict[str, Any]]:
    cache = emulator.cache
    assert isinstance(cache, SlotCache)
    slots = []
    for number, kept in enumerate(cache.slots):
        held = cache.busy.get(number)
        slot: dict[str, Any] = {"id": number, "n_ctx": emulator.settings.context}
        slot["is_processing"] = held is not None
        if held is not None:
            slot |= {"n_prompt_tokens": len(held.prompt), "n_prompt_tokens_cache": held.cached}
            done = len(held.prompt) - held.cached if len(kept) >= len(held.prompt) else 0
            slot["n_prompt_tokens_processed"] = done
        slots.append(slot)
    return slots


def _props(emulator: Emulator) -> dict[str, Any]:
    settings = emulator.settings
    return {
        "default_generation_settings": {"n_ctx": settings.context, "params": {}},
        "total_slots": settings.slots,
        "model_path": settings.model,
        "build_info": "emulated",
    }


def _info(emulator: Emulator) -> dict[str, Any]:
    settings = emulator.settings
    return {
        "model_id": settings.model,
        "max_total_tokens": settings.context,
        "max_concurrent_requests": 128,
        "router": "text-generation-router",
        "version": "3.3.5",
    }


def _version(emulator: Emulator) -> dict[str, Any]:
    return {"version": emulator.settings.release}


OWN: Mapping[str, Mapping[str, Callable[[Emulator], Any]]] = {
    "vllm": {"/version": _version},
    "sglang": {"/server_info": _server_info, "/get_server_info": _server_info},
    "llamacpp": {"/props": _props, "/slots": _slots},
    "tgi": {"/info": _info},
}
