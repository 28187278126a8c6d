"""Any OpenAI server: nothing is known of it but its answers, so everything is learned."""

from __future__ import annotations

from gateway.engines.plain import PlainEngine


class OpenAIServer(PlainEngine):
    """What no other adapter recognises."""
