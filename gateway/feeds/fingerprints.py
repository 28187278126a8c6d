"""Which tokenizer belongs to a model of a foreign engine: the one ``[render]`` names for it."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from gateway.config import RenderConfig
from shared.bundle import load_bundle
from shared.errors import HeadwaterError


class Fingerprints:
    """Loads each configured tokenizer once, to know its fingerprint."""

    def __init__(self, config: RenderConfig) -> None:
        self._config = config
        self._known: dict[str, str] = {}
        self._log: Any = structlog.get_logger("gateway.feeds")

    async def of(self, models: tuple[str, ...]) -> str:
        """Fingerprint for the first of an engine's ``models``; empty: none is configured."""
        named = models[0] if models else ""
        if named not in self._config.tokenizers:
            return ""
        if named not in self._known:
            source = self._config.tokenizers[named]
            try:
                bundle = await asyncio.to_thread(load_bundle, source)
            except (HeadwaterError, OSError, ValueError) as error:
                self._log.warning("tokenizer_unavailable", model=named, reason=str(error))
                return ""
            self._known[named] = bundle.fingerprint
        return self._known[named]
