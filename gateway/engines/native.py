"""Our own worker. It speaks the gateway's language (``/headwater/*``): nothing to translate."""

from __future__ import annotations

from gateway.engines.base import Salting
from gateway.engines.plain import PlainEngine


class Native(PlainEngine):
    """Its info, load and events are read by ``gateway/feeds`` as they are."""

    name = "headwater"
    salting = Salting.TAIL
