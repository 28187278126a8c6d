"""llama.cpp's server: state lives in slots, and each answer says what of its prompt was reused."""

from __future__ import annotations

import json

from gateway.engines import promtext
from gateway.engines.base import Answers, Described, Reading
from gateway.engines.plain import PlainEngine, count, json_object
from shared import openai
from shared.load import WorkerLoad
from shared.openai import Usage

PROPS, SLOTS, METRICS = "/props", "/slots", "/metrics"


class LlamaCpp(PlainEngine):
    """``llama-server``. Its cache has the granularity of a token; it publishes no events."""

    name = "llamacpp"
    asks = (PROPS, SLOTS, METRICS)
    polls = (SLOTS, METRICS)

    def recognises(self, answers: Answers) -> bool:
        """See :class:`gateway.engines.base.Engine`."""
        props = json_object(answers, PROPS)
        if "total_slots" in props and "default_generation_settings" in props:
            return True
        return b"\nllamacpp:" in b"\n" + answers.get(METRICS, b"")

    def describe(self, answers: Answers, host: str) -> Described:
        """See :class:`gateway.engines.base.Engine`."""
        props = json_object(answers, PROPS)
        settings = props.get("default_generation_settings")
        context = count(settings.get("n_ctx")) if isinstance(settings, dict) else 0
        slots = count(props.get("total_slots"))
        return Described(
            version=str(props.get("build_info", ""))[:64],
            block_size=16,  # ours: its own unit is the token, and a key here is 16 of them
            blocks_total=context * slots // 16,
            max_model_len=context,
        )

    def read(self, answers: Answers, block_size: int) -> Reading | None:
        """See :class:`gateway.engines.base.Engine`."""
        slots = _slots(answers)
        samples = promtext.read(answers.get(METRICS, b""), "llamacpp:")
        if slots is None and not samples.found:
            return None
        if slots is not None:
            running = sum(slot.get("is_processing") is True for slot in slots)
        else:
            running = samples.count("llamacpp:requests_processing")
        contexts = sum(count(slot.get("n_ctx")) for slot in slots or ())
        busy = [slot for slot in slots or () if slot.get("is_processing") is True]
        computed = samples.total("llamacpp:prompt_tokens_total")
        predicted = samples.total("llamacpp:tokens_predicted_total")
        return Reading(
            WorkerLoad(
                running=running,
                waiting=samples.count("llamacpp:requests_deferred"),
                queued_prefill_tokens=sum(_to_compute(slot) for slot in busy),
                blocks_total=contexts // block_size,
                blocks_used=sum(count(slot.get("n_prompt_tokens")) for slot in busy) // block_size,
            ),
            work=None if computed is None else computed + (predicted or 0.0),
        )

    def usage(self, answer: object) -> Usage | None:
        """As the standard has it; older builds tell what was reused only in ``timings``."""
        usage = openai.read_usage(answer)
        if usage is None or usage.cached is not None or not isinstance(answer, dict):
            return usage
        timings = answer.get("timings")
        cached = timings.get("cache_n") if isinstance(timings, dict) else None
        if type(cached) is not int or not 0 <= cached <= usage.prompt:
            return usage
        return Usage(usage.prompt, usage.completion, cached)


def _slots(answers: Answers) -> list[dict[str, object]] | None:
    try:
        value = json.loads(answers.get(SLOTS, b""))
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list):
        return None
    return [slot for slot in value if isinstance(slot, dict)]


def _to_compute(slot: dict[str, object]) -> int:
    """Prompt tokens of a busy slot that are neither computed nor reused."""
    done = count(slot.get("n_prompt_tokens_processed")) + count(slot.get("n_prompt_tokens_cache"))
    return max(0, count(slot.get("n_prompt_tokens")) - done)
