"""Text Generation Inference: load from its queue; what it reuses it never says.

Without a word on ``cached_tokens`` nothing can be confirmed, so such a worker is soon *blind*:
balanced by load. Its metric names are those of its documentation.
"""

from __future__ import annotations

from gateway.engines import promtext
from gateway.engines.base import Answers, Described, Reading, Reports
from gateway.engines.plain import PlainEngine, count, json_object
from shared.load import WorkerLoad

METRICS, INFO = "/metrics", "/info"


class TextGenerationInference(PlainEngine):
    """Hugging Face's server."""

    name = "tgi"
    reports = Reports.NEVER
    asks = (INFO, METRICS)
    polls = (METRICS,)

    def recognises(self, answers: Answers) -> bool:
        """See :class:`gateway.engines.base.Engine`."""
        info = json_object(answers, INFO)
        if "model_id" in info and ("max_total_tokens" in info or "router" in info):
            return True
        return b"\ntgi_" in b"\n" + answers.get(METRICS, b"")

    def describe(self, answers: Answers, host: str) -> Described:
        """See :class:`gateway.engines.base.Engine`."""
        info = json_object(answers, INFO)
        return Described(
            version=str(info.get("version", ""))[:64],
            max_model_len=count(info.get("max_total_tokens")),
        )

    def read(self, answers: Answers, block_size: int) -> Reading | None:
        """See :class:`gateway.engines.base.Engine`."""
        samples = promtext.read(answers.get(METRICS, b""), "tgi_", "process_start_time_seconds")
        if not samples.found:
            return None
        return Reading(
            WorkerLoad(
                running=samples.count("tgi_batch_current_size"),
                waiting=samples.count("tgi_queue_size"),
            ),
            work=samples.total("tgi_request_count"),
            started=samples.total("process_start_time_seconds"),
        )
