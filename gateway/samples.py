"""Some requests' own text, for ``headwater lint``: only where ``[ledger] samples_per_minute`` asks.

    Pipeline -> SampleSink.offer -> bounded queue -> thread, each 0.5 s -> DIR/samples (mode 0600)

Of a request only what lint looks at is kept: its model, its messages up to the first answer or its
prompt, and its tools. No image, no header, no key, no salt, no name of a user or a tenant. What
does not fit the queue or cannot be written is counted and logged; nothing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gateway.config import LedgerConfig
from gateway.exchange import Inbound
from gateway.filesink import FileSink
from gateway.ledgerfile import LedgerFile

FOLDER = "samples"
"""Under the ledger's folder."""
FLUSH_S = 0.5
QUEUE_SAMPLES = 64
MAX_BODY = 1 << 20
"""Bytes; larger requests are passed over."""
_BURST = 10.0
"""So many may be taken at once: prompts that come together are worth comparing."""


class SampleSink(FileSink[tuple[float, int, bytes]]):
    """Takes some of the requests that come; one per gateway process."""

    def __init__(
        self,
        config: LedgerConfig,
        instance: str,
        *,
        clock: Callable[[], float] = time.time,
        flush_s: float = FLUSH_S,
    ) -> None:
        """Open ``DIR/samples`` and start the writer.

        :raises ConfigError: the folder cannot be made or written.
        """
        file = LedgerFile.open(
            str(Path(config.dir) / FOLDER),
            instance,
            int(config.rotate_mib * 2**20),
            config.keep_files,
            clock,
        )
        self._per_s = config.samples_per_minute / 60.0
        self._tokens, self._refilled = _BURST, 0.0
        self._untaken = 0
        self._log = structlog.get_logger("headwater.samples")
        super().__init__("headwater-samples", file, limit=QUEUE_SAMPLES, flush_s=flush_s)

    def offer(self, inbound: Inbound) -> None:
        """Take this request or pass it over. Never blocks, never raises."""
        self._untaken += 1
        now = inbound.arrived
        gained = max(0.0, now - self._refilled) * self._per_s
        self._tokens, self._refilled = min(_BURST, self._tokens + gained), now
        if self._tokens < 1.0 or len(inbound.body) > MAX_BODY:
            return
        self._tokens -= 1.0
        self._thread.put((inbound.wall_at, self._untaken, inbound.body))
        self._untaken = 0

    def _write(self, items: list[tuple[float, int, bytes]]) -> None:
        lines = [line for sample in items if (line := sample_line(*sample)) is not None]
        kept, error = self._file.write(lines) if lines else (0, None)
        self._unwritten += len(lines) - kept
        if self.dropped > self._told:
            new, self._told = self.dropped - self._told, self.dropped
            reason = "its queue was full" if error is None else error.strerror
            self._log.warning("samples_lost", requests=new, reason=reason)


def sample_line(at: float, stands_for: int, body: bytes) -> bytes | None:
    """A line of the file, with its newline; None: there is nothing in the body to compare.

    :param stands_for: requests since the sample before, this one counted.
    """
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    kept: dict[str, Any] = {"timestamp": round(at, 3), "of": stands_for}
    if isinstance(model := asked.get("model"), str):
        kept["model"] = model
    if isinstance(messages := asked.get("messages"), list):
        kept["messages"] = _messages(asked.get("system"), messages)
        if isinstance(tools := asked.get("tools"), list):
            kept["tools"] = tools
    elif isinstance(prompt := asked.get("prompt"), str):
        kept["prompt"] = prompt
    else:
        return None
    return msgspec.json.encode(kept) + b"\n"


def _messages(system: Any, messages: list[Any]) -> list[dict[str, str]]:
    """Roles and texts up to the first answer; a system prompt of its own stands first."""
    kept = [{"role": "system", "content": _text(system)}] if system else []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            break
        if role in {"assistant", "tool", "function"}:
            break
        kept.append({"role": role, "content": _text(message.get("content"))})
    return kept


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))
