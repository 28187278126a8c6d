"""Which addresses the gateway may be made to connect to by an admin call or a discovery source.

Not those behind which no worker can be, but a cloud's instance metadata may: link-local, multicast,
unspecified and the known metadata addresses, in any notation, also behind a name. The static list
in the gateway's own configuration is not limited by this.

A name is looked at again whenever it is looked up for a connection (:class:`Reachable`): whoever
owns it may let it lead elsewhere later.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from aiohttp import ThreadedResolver
from aiohttp.abc import ResolveResult

from shared.errors import BadRequest

METADATA = frozenset(
    map(
        ip_address,
        (
            *("169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
            *("fd00:ec2::254", "fd20:ce::254"),
        ),
    )
)
"""Instance metadata of the large clouds, and what configures machines there."""
_CLOTHES = frozenset(
    int(IPv6Address(begin)) >> 32 for begin in ("64:ff9b::", "64:ff9b:1::", "::", "::ffff:0:0:0")
)
"""Beginnings of IPv6 addresses that end in an IPv4 address: NAT64, the form before it, SIIT."""
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""The same behind any network: what stands between."""
_BROADCAST = IPv4Address("255.255.255.255")
_LOOPBACK = IPv6Address("::1")


def plain(text: str) -> IPv4Address | IPv6Address:
    """An address without its zone; an IPv4 address in IPv6 clothes is itself."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv4Address):
        return address
    inside = address.ipv4_mapped or address.sixtofour
    begin = int(address) >> 32
    dressed = (begin in _CLOTHES and address != _LOOPBACK) or begin & 0xFFFFFFFF in _ISATAP
    if inside is None and dressed:
        inside = IPv4Address(int(address) & 0xFFFFFFFF)
    return inside or address


def is_allowed(text: str) -> bool:
    """Whether a worker may be at this address."""
    address = plain(text)
    odd = address.is_link_local or address.is_multicast or address.is_unspecified
    return not odd and address not in METADATA and address != _BROADCAST


class Reachable:
    """To which addresses connections may be made, by the name that led there."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self.replace(urls)

    def replace(self, urls: Iterable[str]) -> None:
        """Another static list: its hosts may be anywhere."""
        self._free = frozenset((urlsplit(url).hostname or "").lower() for url in urls)

    def allows(self, host: str, address: str) -> bool:
        """Whether a connection to ``host`` may go to this address of it. Pure."""
        return host.lower() in self._free or is_allowed(address)


class CheckedResolver(ThreadedResolver):
    """aiohttp's look-up without the addresses that may not be reached."""

    def __init__(self, reachable: Reachable) -> None:
        super().__init__()
        self._reachable = reachable

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """See ``aiohttp.abc.AbstractResolver``; raises ``OSError`` if nothing is left."""
        found = await super().resolve(host, port, family)
        kept = [one for one in found if self._reachable.allows(host, one["host"])]
        if not kept:
            raise OSError(NOWHERE)
        return kept


NOWHERE = "the name leads to no address where a worker may be"


async def refusal(url: str) -> str:
    """Why no worker may be at a checked base URL; empty if one may. Connects to nothing."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = [str(ip_address(host.partition("%")[0]))]
    except ValueError:  # a name, or another notation of an address
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, None)
        except (OSError, UnicodeError):
            return f"'{host[:100]}' has no address."
        addresses = [str(place[4][0]) for place in found]
    if all(is_allowed(address) for address in addresses):
        return ""
    return (
        f"No worker is taken in at '{host[:100]}': link-local, multicast, unspecified and "
        "metadata addresses are refused."
    )


async def check_address(url: str) -> None:
    """Raise ``BadRequest`` unless a worker may be at a checked base URL."""
    reason = await refusal(url)
    if reason:
        raise BadRequest(reason, param="url")
