"""SGLang: events in its four forms, discovery through ``/server_info``, ``sglang:`` metrics."""

from __future__ import annotations

from gateway.engines import frames, promtext
from gateway.engines.base import Answers, Described, FeedPlan, Frame, Reading, Reports, Salting
from gateway.engines.plain import PlainEngine, count, digits, json_object
from shared.load import WorkerLoad

METRICS, INFO, OLD_INFO = "/metrics", "/server_info", "/get_server_info"
WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
MAX_RANKS = 1024
_CONFIG = "sglang:cache_config_info"


class Sglang(PlainEngine):
    """Needs ``--kv-events-config`` for events, ``--enable-cache-report`` for usage and
    ``--enable-metrics`` for load."""

    name = "sglang"
    reports = Reports.NOT_ZERO
    salting = Salting.ROOT
    publishes = True
    asks = (METRICS, INFO, OLD_INFO)
    polls = (METRICS,)

    def recognises(self, answers: Answers) -> bool:
        """See :class:`gateway.engines.base.Engine`."""
        info = json_object(answers, INFO, OLD_INFO)
        if "page_size" in info and ("kv_events" in info or "disable_radix_cache" in info):
            return True
        return b"\nsglang:" in b"\n" + answers.get(METRICS, b"")

    def describe(self, answers: Answers, host: str) -> Described:
        """See :class:`gateway.engines.base.Engine`."""
        info = json_object(answers, INFO, OLD_INFO)
        samples = promtext.read(answers.get(METRICS, b""), "sglang:")
        told = info.get("kv_events")
        events = told if isinstance(told, dict) else {}
        size = count(events.get("block_size")) or count(info.get("page_size"))
        size = size or digits(samples.label(_CONFIG, "page_size"))
        tokens = count(info.get("max_total_num_tokens"))
        tokens = tokens or samples.count("sglang:max_total_num_tokens")
        return Described(
            version=str(info.get("version", ""))[:64],
            block_size=size,
            blocks_total=tokens // size if size else 0,
            max_model_len=count(info.get("context_length")),
            prefix_cache=info.get("disable_radix_cache") is not True,
            feed=_feed(events, host),
        )

    def read(self, answers: Answers, block_size: int) -> Reading | None:
        """See :class:`gateway.engines.base.Engine`."""
        text = answers.get(METRICS, b"")
        samples = promtext.read(text, "sglang:", "process_start_time_seconds")
        if "sglang:num_running_reqs" not in samples.found:
            return None
        total = samples.count("sglang:max_total_num_tokens")
        used = samples.count("sglang:num_used_tokens")
        if "sglang:num_used_tokens" not in samples.found:
            used = int(total * min(1.0, max(0.0, samples.mean("sglang:token_usage") or 0.0)))
        prompts = samples.total("sglang:prompt_tokens_total")
        answered = samples.total("sglang:generation_tokens_total")
        return Reading(
            WorkerLoad(
                running=samples.count("sglang:num_running_reqs"),
                waiting=samples.count("sglang:num_queue_reqs"),
                blocks_total=total // block_size,
                blocks_used=used // block_size,
            ),
            work=None if prompts is None else prompts + (answered or 0.0),
            started=samples.total("process_start_time_seconds"),
        )

    def decode(self, payload: bytes) -> Frame:
        """See :class:`gateway.engines.base.Engine`."""
        return frames.decode(payload, frames.SGLANG)


def _feed(events: dict[str, object], host: str) -> FeedPlan | None:
    """The addresses that ``/server_info`` tells: one port further for each rank."""
    port, ranks = count(events.get("endpoint_port_base")), count(events.get("dp_size")) or 1
    if events.get("publisher") != "zmq" or not port or ranks > MAX_RANKS:
        return None
    named = events.get("endpoint_host")
    place = host if not isinstance(named, str) or named in WILDCARDS or not named else named
    replay = count(events.get("replay_endpoint_port_base"))
    topic = events.get("topic")
    return FeedPlan(
        endpoints=tuple(f"tcp://{place}:{port + rank}" for rank in range(ranks)),
        replays=tuple(f"tcp://{place}:{replay + rank}" for rank in range(ranks)) if replay else (),
        topic=topic if isinstance(topic, str) else "",
    )
