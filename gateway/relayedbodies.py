"""Bodies of requests that are passed on: which model is meant, and whether they can be read at all.

They reach a worker byte for byte, but not what no reader takes: some engines answer that with a
server error, which looks like a fault of theirs. What only strict readers refuse (``NaN``, halves
of surrogate pairs, numbers of any size) passes. Of bodies that are no JSON (sound, forms) or come
packed nothing is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gateway.exchange import Inbound
from shared import dialogue, laxjson
from shared.checks import json_name
from shared.errors import BadRequest

JSON_ROUTES = dialogue.ROUTES | {
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
    "/detokenize",
}
"""Their bodies are JSON objects, whatever they are declared as."""


class _Named(msgspec.Struct):
    model: str | None = None


def model_of(inbound: Inbound, models: Sequence[str]) -> str:
    """The model of a request. Without a ``model`` the only one there is is meant.

    :raises BadRequest: there is more than one, or none; or its body cannot be read.
    """
    try:
        model = msgspec.json.decode(inbound.body, type=_Named).model
    except (msgspec.DecodeError, RecursionError):
        _check(inbound)
        model = None
    if not model and len(models) == 1:
        model = models[0]
    if not model:
        raise BadRequest(
            "'model' is required: there is more than one model, or none.",
            param="model",
            code="model_not_found",
        )
    return model


def _check(inbound: Inbound) -> None:
    """Refuse a body that should be JSON and is none."""
    known = inbound.route in JSON_ROUTES
    if not inbound.body and not known:
        return
    if not (known or _declared(inbound.headers)) or _packed(inbound.headers):
        return
    try:
        value = laxjson.decode(inbound.body)
    except laxjson.NotJson as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if known and not isinstance(value, dict):
        raise BadRequest(f"The body must be a JSON object, not {json_name(value)}.")


def _declared(headers: Mapping[str, str]) -> bool:
    kind = headers.get("Content-Type", "").split(";", 1)[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def _packed(headers: Mapping[str, str]) -> bool:
    return headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity")
