"""How slow and how large clients of the public listener may be."""

from __future__ import annotations

import time

HEAD_S = 30.0
"""A request's head must be complete so long after the connection was made or the last answer was
sent; also how long an idle connection is kept."""
BODY_S = 20.0
"""A body may pause so long, plus a second for each ``BODY_RATE`` bytes that have come."""
BODY_RATE = 64 * 1024
LINGER_S = 5.0
"""After an early answer, how long the rest of a body is read and thrown away."""
MAX_HEAD_BYTES = 65_536
STRANGE_HEADS = 8
"""After so many heads in a row that differ from the one before, a connection's are not compared any
more."""
MAX_PIPELINED = 16
"""About so many requests of one connection are read ahead; the rest waits unread."""
SLICE_BYTES = 1024
"""What is parsed at a time of a read that holds more requests than that."""
BACKLOG = 4096
STALL_S = 60.0
"""A client that takes in nothing of its answer for so long has left: the connection is cut, and the
worker's answer with it."""
WRITE_BYTES = 65_536
"""What may lie unsent for a slow reader before its answer is read no further."""

now = time.monotonic
