"""What is known of each address that is no worker of ours: its engine, its events, its quirks.

Filled from the configuration, from what the engines say, and from what their events show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gateway.config import StaticWorker, WorkersConfig
from gateway.discovery.base import worker_url
from gateway.engines import catalogue
from gateway.engines.base import Described, Engine, FeedPlan
from shared.types import WorkerId

NONE = "none"


@dataclass(slots=True)
class Entry:
    """One address."""

    url: str
    settings: StaticWorker
    engine: Engine | None = None
    """None: not found out yet."""
    plan: FeedPlan | None = None
    """Where it publishes; None: nowhere that is known."""
    block_size: int = 0
    """As its events show; 0: they showed none. It outweighs what the engine says of itself."""

    @property
    def host(self) -> str:
        """Host of the URL, fit for an address."""
        host = urlsplit(self.url).hostname or ""
        return f"[{host}]" if ":" in host else host


@dataclass(slots=True)
class EngineBook:
    """All entries by URL, and the workers that should announce again what they reuse."""

    config: WorkersConfig
    recalling: set[WorkerId] = field(default_factory=set)
    """Workers of whose contents only a part is known: see ``Engine.edits``."""
    _entries: dict[str, Entry] = field(default_factory=dict)
    _settings: dict[str, StaticWorker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replace(self.config)

    def replace(self, config: WorkersConfig) -> None:
        """The configuration was read again: addresses whose settings are others begin anew."""
        self.config = config
        self._settings = {
            worker_url("workers.static.url", one.url.strip()): one for one in config.static
        }
        for url, entry in list(self._entries.items()):
            if entry.settings != self._settings_of(url):
                del self._entries[url]

    def _settings_of(self, url: str) -> StaticWorker:
        return self._settings.get(url) or StaticWorker(url, self.config.engine)

    def at(self, url: str) -> Entry:
        """The entry of an address; made when it is first asked for."""
        entry = self._entries.get(url)
        if entry is None:
            entry = self._entries[url] = Entry(url, self._settings_of(url))
        if entry.settings.engine != catalogue.AUTO:
            entry.engine = catalogue.engine(entry.settings.engine)
        return entry

    def forget(self, url: str) -> None:
        """An address is gone, or serves something else."""
        self._entries.pop(url, None)

    def describe(self, entry: Entry, described: Described) -> None:
        """Take over where it publishes: as configured, as it says, or where it usually is."""
        settings = entry.settings
        if entry.engine is None or not entry.engine.publishes or settings.events == NONE:
            entry.plan = None
        elif settings.events:
            replay = "" if settings.replay == NONE else settings.replay
            entry.plan = FeedPlan(
                _ranks(settings.events, settings.ranks),
                _ranks(replay, settings.ranks) if replay else (),
                settings.topic,
            )
        elif described.feed is not None:
            entry.plan = described.feed
        else:
            entry.plan = self._usual(entry)

    def _usual(self, entry: Entry) -> FeedPlan | None:
        """vLLM does not say where it publishes."""
        port, replay, settings = self.config.event_port, self.config.replay_port, entry.settings
        if entry.engine is None or entry.engine.name != "vllm" or not port:
            return None
        wants_replay = replay and settings.replay != NONE
        return FeedPlan(
            _ranks(f"tcp://{entry.host}:{port}", settings.ranks),
            _ranks(f"tcp://{entry.host}:{replay}", settings.ranks) if wants_replay else (),
            settings.topic,
        )


def _ranks(address: str, ranks: int) -> tuple[str, ...]:
    """One address per rank: each a port further (``tcp``), else with a suffix."""
    if ranks == 1:
        return (address,)
    place, _, port = address.rpartition(":")
    if address.startswith("tcp://") and port.isdecimal():
        return tuple(f"{place}:{int(port) + rank}" for rank in range(ranks))
    return tuple(f"{address}_dp{rank}" if rank else address for rank in range(ranks))
