"""The same text under other cache salts: tells what *isolation* costs from what was never seen.

A salt makes other keys of the same tokens, so the index cannot see that another tenant's copy is
there. This memory remembers, for prompts that were served under a salt, which salted key stands for
which unsalted one; the other copy is then looked up like any prompt. It only ever counts: nothing
here is matched, promised or shown to a client.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.types import BlockKey


class Scopes:
    """Unsalted key -> salted key that was served last, in two generations; pure.

    :param max_keys: entries kept at most, both generations together.
    """

    def __init__(self, max_keys: int) -> None:
        self._half = max(1, max_keys // 2)
        self._young: dict[int, BlockKey] = {}
        self._old: dict[int, BlockKey] = {}
        self.in_use = False
        """Something is remembered."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, plain: Sequence[BlockKey], salted: Sequence[BlockKey]) -> None:
        """A prompt was served under a salt; both have one key per granule."""
        if len(self._young) + len(plain) > self._half:
            self._old, self._young = self._young, {}
        self.in_use = self.in_use or len(plain) > 0
        kept = min(len(plain), self._half)
        self._young.update(zip(plain[:kept], salted[:kept], strict=True))

    def copies(self, plain: Sequence[BlockKey]) -> list[BlockKey]:
        """Keys under which the longest known beginning of a prompt was served elsewhere. Pure."""
        found: list[BlockKey] = []
        for key in plain:
            salted = self._young.get(key) or self._old.get(key)
            if salted is None:
                break
            found.append(salted)
        return found
