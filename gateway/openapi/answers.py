"""Schemas of what the gateway answers. Those of admin routes come from the types themselves."""

from __future__ import annotations

from msgspec import StructMeta

from gateway.decision import Overlap, WorkerStatus
from gateway.feeds.sources import SourceState
from gateway.indexview import Holder, IndexStats, WhoHolds, WorkerContents
from gateway.openapi.schemas import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    Schema,
    listed,
    maybe,
    obj,
    of_types,
    ref,
    said,
)
from gateway.report import model
from gateway.tally import Served

_USAGE = obj(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": maybe(
            obj(
                {
                    "cached_tokens": said(
                        maybe(COUNT),
                        "Prompt tokens that the engine did not compute again. Left out: not known.",
                    )
                },
                required=(),
            )
        ),
    },
    required=("prompt_tokens", "completion_tokens", "total_tokens"),
)


def _completion(choice: dict[str, Schema]) -> Schema:
    return obj(
        {
            "id": TEXT,
            "object": TEXT,
            "created": WHOLE,
            "model": TEXT,
            "choices": listed(
                obj({"index": COUNT, **choice, "finish_reason": maybe(TEXT)}, required=("index",))
            ),
            "usage": ref("Usage"),
        },
        required=("choices",),
    )


GENERATED: dict[str, Schema] = {
    "Usage": _USAGE,
    "Chat": _completion(
        {"message": obj({"role": TEXT, "content": maybe(TEXT)}, required=("role",))}
    ),
    "Completion": _completion({"text": TEXT}),
}
"""What workers answer, as far as all of them agree."""

READS: dict[str, Schema] = {
    "Model": obj(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": WHOLE,
            "owned_by": TEXT,
            "root": TEXT,
            "parent": said(maybe(TEXT), "Of an adapter: the model it belongs to."),
        }
    ),
    "Models": obj({"object": {"const": "list"}, "data": listed(ref("Model"))}),
    "Alive": obj({"status": {"const": "alive"}}),
    "Readiness": obj(
        {
            "status": {"type": "string", "enum": ["ready", "unavailable", "draining"]},
            "reasons": said(listed(TEXT), "Why no request can be served; empty if one can."),
            "notes": said(listed(TEXT), "What does not work as well as it could."),
        },
        required=("status", "reasons"),
    ),
}

_ASKED = obj(
    {
        "model": maybe(TEXT),
        "route": said(TEXT, "Where it would be sent."),
        "prompt_tokens": said(COUNT, "0: they are not counted."),
        "blocks": COUNT,
        "block_tokens": COUNT,
        "previous_worker": said(
            maybe(TEXT), "Who gave the response that it goes on from; null: nobody knows."
        ),
        "tenant": said(TEXT, "Whose request it would be; empty: nobody's."),
        "tenant_missing": said(
            {"type": "boolean"}, "Tenants are kept apart and none is named: nothing is found."
        ),
        "tokenizer": TEXT,
        "tokenizer_missing": {"type": ["string", "boolean", "null"]},
    },
    required=("model", "prompt_tokens", "blocks", "block_tokens"),
)

_SCORED = obj(
    {
        "id": TEXT,
        "state": ref("WorkerState"),
        "trust": ref("Trust"),
        "matched_tokens": COUNT,
        "host_tokens": COUNT,
        "cost_s": said(maybe(NUMBER), "The sum of `parts`, for `cost` in seconds."),
        "parts": {"type": "object", "additionalProperties": maybe(NUMBER)},
        "inflight": COUNT,
    }
)

_EXPLAINED = obj(
    {
        "request": ref("Asked"),
        "choice": said(maybe(TEXT), "Id of the worker; null: nobody can take it."),
        "policy": TEXT,
        "matched_tokens": COUNT,
        "predicted_ttft_s": NUMBER,
        "overlap": ref("Overlap"),
        "reason": said(TEXT, "One sentence."),
        "reason_code": TEXT,
        "reject": maybe(OBJECT),
        "workers": said(listed(ref("Scored")), "In the order in which they would be tried."),
    },
    required=("request", "choice", "reason", "reject", "workers"),
)

_LINE = obj(
    {
        "id": TEXT,
        "at": said(NUMBER, "Seconds since the epoch."),
        "model": TEXT,
        "worker": TEXT,
        "outcome": TEXT,
        "final": FLAG,
        "prompt": COUNT,
        "delivered": COUNT,
        "reported": FLAG,
        "ttft_s": maybe(NUMBER),
        "reason": TEXT,
    }
)


def admin_schemas() -> dict[str, Schema]:
    """Components of the admin document."""
    found = of_types(
        [
            *(WorkerStatus, Served, SourceState, Overlap, IndexStats, WorkerContents),
            *(WhoHolds, Holder),
            *(kind for kind in vars(model).values() if isinstance(kind, StructMeta)),
        ]
    )
    worker = found.pop("WorkerStatus")
    served = found.pop("Served")["properties"]
    worker["properties"] |= served
    worker["properties"]["sources"] = said(listed(TEXT), "Who named it.")
    worker["required"] = list(worker["properties"])
    own: dict[str, Schema] = {
        "Worker": worker,
        "Workers": obj({"workers": listed(ref("Worker")), "lists": listed(ref("SourceState"))}),
        "Changed": obj({"worker": TEXT, "state": TEXT}),
        "Address": obj({"url": said(TEXT, "Base URL of the worker.")}),
        "Alive": READS["Alive"],
        "Asked": _ASKED,
        "Scored": _SCORED,
        "Explained": _EXPLAINED,
        "Who": {
            **found["WhoHolds"],
            "properties": {"request": ref("Asked"), **found["WhoHolds"]["properties"]},
            "required": ["request", *found["WhoHolds"]["required"]],
        },
        "FlushRequest": {
            "description": "One worker, or all.",
            "oneOf": [
                obj({"worker": TEXT}),
                obj({"all": {"const": True}}),
            ],
        },
        "Flushed": obj(
            {"flushed": {"type": "object", "additionalProperties": COUNT}},
        ),
        "Line": _LINE,
        "Lines": obj({"requests": listed(ref("Line"))}),
        "RequestAttempts": obj(
            {"attempts": said(listed(OBJECT), "Each with its scored candidates, oldest first.")}
        ),
        "State": obj(
            {
                "at": NUMBER,
                "workers": listed(OBJECT),
                "recent": listed(ref("Line")),
            }
        ),
    }
    assert not own.keys() & found.keys(), "two schemas of one name"
    return found | own
