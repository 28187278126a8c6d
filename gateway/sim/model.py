"""How fast a simulated worker is, and what a run is about: plain values."""

from __future__ import annotations

import msgspec


class WorkerModel(msgspec.Struct, frozen=True):
    """One worker's speed and memory. Prefills run one at a time, decodes all at once."""

    kv_blocks: int
    """Blocks of KV memory."""
    prefill_tokens_per_s: float = 10_000.0
    overhead_s: float = 0.005
    """Per prefill, whatever its length."""
    token_s: float = 0.02
    """Of a sequence that decodes alone."""
    decode_knee: float = 64.0
    """So many sequences decoding together take twice the time per token."""
    decode_tax: float = 0.004
    """Share by which each decoding sequence slows a prefill down."""
    max_running: int = 256
    """Sequences that decode together at most."""
    quadratic: float = 0.0
    """Attention's share of prefill per token of context; about 2e-5 on real engines."""

    def prefill_s(self, uncached: int, total: int, decoding: int = 0) -> float:
        """Seconds from the start of a prefill to its first token."""
        attention = 1.0 + self.quadratic * (total - uncached / 2)
        work = uncached / self.prefill_tokens_per_s * attention
        return self.overhead_s + work * (1.0 + self.decode_tax * decoding)

    def decode_s(self, tokens: int, decoding: int) -> float:
        """Seconds that an answer takes among ``decoding`` sequences, itself counted."""
        return tokens * self.token_s * (1.0 + decoding / self.decode_knee)


def cached_tokens(depth: int, block_size: int, input_tokens: int) -> int:
    """Tokens of ``depth`` cached blocks that need no computing: never the prompt's last one."""
    return min(depth * block_size, input_tokens - 1)
