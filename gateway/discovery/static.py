"""The static list of workers in the configuration."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.config import WorkersConfig
from gateway.discovery.base import Listing, address_of, worker_url
from shared.errors import ConfigError


def static_urls(
    urls: Iterable[str], key: str = "workers.urls", found: dict[str, str] | None = None
) -> tuple[str, ...]:
    """The base URLs of a list, in its order; ``found``: addresses that are there already.

    :raises ConfigError: an entry is no URL, or an address is there twice.
    """
    found = {} if found is None else found
    fresh = []
    for text in urls:
        url = worker_url(key, text.strip())
        address = address_of(url)
        if address in found:
            raise ConfigError(key, text, f"the same worker as {found[address]}")
        found[address] = url
        fresh.append(url)
    return tuple(fresh)


def static_listing(config: WorkersConfig) -> Listing:
    """``workers.urls`` and ``workers.static`` together. Raises as :func:`static_urls`."""
    found: dict[str, str] = {}
    listed = static_urls(config.urls, found=found)
    own = (worker.url for worker in config.static)
    return Listing(dict.fromkeys(listed + static_urls(own, "workers.static.url", found), ""))
