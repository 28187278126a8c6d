"""The static list of workers in the configuration."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.config import WorkersConfig
from gateway.discovery.base import Listing, address_of, worker_url
from shared.errors import ConfigError


def static_urls(urls: Iterable[str], key: str = "workers.urls") -> tuple[str, ...]:
    """The base URLs of a list, in its order.

    :raises ConfigError: an entry is no URL, or an address is there twice.
    """
    found: dict[str, str] = {}
    for text in urls:
        url = worker_url(key, text.strip())
        address = address_of(url)
        if address in found:
            raise ConfigError(key, text, f"the same worker as {found[address]}")
        found[address] = url
    return tuple(found.values())


def static_listing(config: WorkersConfig) -> Listing:
    """The whole static list. Raises as :func:`static_urls`."""
    return Listing(dict.fromkeys(static_urls(config.urls), ""))
