"""The sockets that one of several processes on a port gets from the process that started it.

The parent binds them and keeps them: what waits in a socket's queue when its process dies is not
lost, because another one accepts from there until a new process does (``gateway.foster``).
"""

from __future__ import annotations

import os
from socket import socket

import msgspec


class Inherited(msgspec.Struct, frozen=True):
    """File descriptors, bound; the public ones share the port (``SO_REUSEPORT``)."""

    number: int
    """Of this process, from 0."""
    public: tuple[tuple[int, ...], ...]
    """By process: one for each address of the public host."""
    admin: int
    """Of this process, on loopback."""

    def of(self, number: int) -> list[socket]:
        """The public ones of a process, one of each address; raises ``IndexError``."""
        return [self.taken(fd) for fd in self.public[number]]

    @staticmethod
    def taken(fd: int) -> socket:
        """A descriptor as a socket that can be closed without closing the parent's."""
        sock = socket(fileno=os.dup(fd))
        sock.setblocking(False)
        return sock


def number_of(inherited: Inherited | None) -> int | None:
    """Number of this process among those on its port; None: it is the only one."""
    return None if inherited is None else inherited.number
