"""What one of several processes on a port gets from the process that started it: its sockets, and
memory in which all show each other what they have encoded.

The parent binds them and keeps them: what waits in a socket's queue when its process dies is not
lost, because another one accepts from there until a new process does (``gateway.foster``).
"""

from __future__ import annotations

import os
from socket import socket

import msgspec

from shared.shownpieces import ShownPieces


class Inherited(msgspec.Struct, frozen=True):
    """File descriptors, bound; the public ones share the port (``SO_REUSEPORT``)."""

    number: int
    """Of this process, from 0."""
    public: tuple[tuple[int, ...], ...]
    """By process: one for each address of the public host."""
    admin: int
    """Of this process, on loopback."""
    pieces: int
    """Memory for :class:`shared.shownpieces.ShownPieces`."""
    secret: bytes
    """For the names there."""

    def of(self, number: int) -> list[socket]:
        """The public ones of a process, one of each address; raises ``IndexError``."""
        return [self.taken(fd) for fd in self.public[number]]

    @staticmethod
    def taken(fd: int) -> socket:
        """A descriptor as a socket that can be closed without closing the parent's."""
        sock = socket(fileno=os.dup(fd))
        sock.setblocking(False)
        return sock


def shown_by(inherited: Inherited | None) -> ShownPieces | None:
    """What the processes on this port show each other; None: there is but one."""
    if inherited is None:
        return None
    areas = len(inherited.public)
    return ShownPieces(inherited.pieces, inherited.number, areas, inherited.secret)


def number_of(inherited: Inherited | None) -> int | None:
    """Number of this process among those on its port; None: it is the only one."""
    return None if inherited is None else inherited.number
