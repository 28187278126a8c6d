"""What takes pieces of a body as they come, chunks as such where they come alone."""

from __future__ import annotations

import re
from collections.abc import Callable

_WHOLE = re.compile(rb"([1-9a-f][0-9a-f]*)\r\n(.+)\r\n", re.DOTALL)


class Takes:
    """:class:`gateway.upstream.Taker` that asks for each piece.

    :param alone: chunks are taken without their parser.
    """

    def __init__(self, accepts: Callable[[bytes], bool], *, alone: bool = True) -> None:
        self._accepts, self._alone = accepts, alone
        self.chunks = 0
        """Taken without the parser."""

    def take(self, data: bytes) -> bool:
        """See :class:`gateway.upstream.Taker`."""
        return self._accepts(data)

    def take_chunk(self, data: bytes) -> bool:
        """See :class:`gateway.upstream.Taker`."""
        whole = _WHOLE.fullmatch(data) if self._alone else None
        if whole is None or int(whole[1], 16) != len(whole[2]) or not self._accepts(whole[2]):
            return False
        self.chunks += 1
        return True
