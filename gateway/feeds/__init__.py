"""The gateway's background side: membership, health, load, cache events and peers' bookings."""

from gateway.feeds.feeds import Feeds, Sources
from gateway.index.stats import FeedStats

__all__ = ["FeedStats", "Feeds", "Sources"]
