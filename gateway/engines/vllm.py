"""vLLM: events in array form (until 0.23) and map form (since 0.24), metrics of all V1 releases."""

from __future__ import annotations

import json

from gateway.engines import frames, promtext
from gateway.engines.base import Answers, Described, Frame, Reading, Salting
from gateway.engines.plain import PlainEngine, digits, json_object
from shared.jsonsplice import Edit, members, set_member
from shared.load import WorkerLoad

METRICS, VERSION = "/metrics", "/version"
_CONFIG = "vllm:cache_config_info"
_RECALL = b'{"kv_cache_report_mode":"full"}'


class Vllm(PlainEngine):
    """Needs ``--kv-events-config`` for events and ``--enable-prompt-tokens-details`` for usage."""

    name = "vllm"
    salting = Salting.ROOT
    publishes = True
    asks = (METRICS, VERSION)
    polls = (METRICS,)

    def recognises(self, answers: Answers) -> bool:
        """See :class:`gateway.engines.base.Engine`."""
        return b"\nvllm:" in b"\n" + answers.get(METRICS, b"")

    def describe(self, answers: Answers, host: str) -> Described:
        """See :class:`gateway.engines.base.Engine`."""
        samples = promtext.read(answers.get(METRICS, b""), _CONFIG)
        return Described(
            version=str(json_object(answers, VERSION).get("version", ""))[:64],
            block_size=digits(samples.label(_CONFIG, "block_size")),
            blocks_total=digits(samples.label(_CONFIG, "num_gpu_blocks")),
            prefix_cache=samples.label(_CONFIG, "enable_prefix_caching") != "False",
        )

    def read(self, answers: Answers, block_size: int) -> Reading | None:
        """See :class:`gateway.engines.base.Engine`."""
        text = answers.get(METRICS, b"")
        samples = promtext.read(text, "vllm:", "process_start_time_seconds")
        if "vllm:num_requests_running" not in samples.found:
            return None
        total = digits(samples.label(_CONFIG, "num_gpu_blocks"))
        share = samples.mean("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc") or 0.0
        prompts = samples.total("vllm:prompt_tokens_total")
        answered = samples.total("vllm:generation_tokens_total")
        return Reading(
            WorkerLoad(
                running=samples.count("vllm:num_requests_running"),
                waiting=samples.count("vllm:num_requests_waiting"),
                blocks_total=total,
                blocks_used=round(total * min(1.0, max(0.0, share))),
            ),
            work=None if prompts is None else prompts + (answered or 0.0),
            started=samples.total("process_start_time_seconds"),
        )

    def decode(self, payload: bytes) -> Frame:
        """See :class:`gateway.engines.base.Engine`."""
        return frames.decode(payload, frames.VLLM)

    def edits(self, raw: bytes, *, recall: bool) -> list[Edit]:
        """``vllm_xargs.kv_cache_report_mode = "full"``; older releases pass over it."""
        if not recall:
            return []
        for member in members(raw):
            if member.key != "vllm_xargs":
                continue
            if raw[member.start : member.start + 1] == b"{":
                return set_member(
                    raw, "kv_cache_report_mode", json.dumps("full").encode(), member.start
                )
            return [Edit(member.start, member.end, _RECALL)]
        return set_member(raw, "vllm_xargs", _RECALL)
