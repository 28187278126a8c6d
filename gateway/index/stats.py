"""What the background side counts; read by telemetry, written only by the feeds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FeedStats:
    """Counters since the start, and the present state of the shared index."""

    redis_configured: bool = False
    redis_up: bool = False
    redis_reason: str = ""
    """Why it is not up; empty if it is, or if none is configured."""
    redis_outages: int = 0
    index_lag_s: float = 0.0
    """Age, in the Redis server's own clock, of the newest batch when it was taken in; 0 when there
    was nothing to read. During an outage: time since the log was read last."""

    batches: int = 0
    """Applied."""
    duplicates: int = 0
    gaps: int = 0
    """Times that a worker's sequence had a hole, or its end was lost."""
    old_epochs: int = 0
    unknown_workers: int = 0
    decode_errors: int = 0
    checkpoint_resyncs: int = 0
    """Contents taken from a checkpoint in Redis."""
    http_resyncs: int = 0
    """Contents taken as a snapshot from a worker itself."""
    http_feeds: int = 0
    """Event feeds that are read from workers directly, now."""
    cursor_resets: int = 0
    """Times that the log was another one (failover) or was skipped because it lagged too far."""
    learned_from_peers: int = 0
    """Prompts of which another gateway told that they were served."""
    conflicts: int = 0
    """Workers left out because another one has their name."""
    task_failures: int = 0
    """Unexpected errors in background tasks; each was logged and the task went on."""
    peers: int = 0
    """Other gateways that share their bookings now."""

    engine_feeds: int = 0
    """Event streams of engines of other makes that are followed now, one per rank."""
    engine_frames: int = 0
    malformed_frames: int = 0
    """Frames of engines that are no batch of events."""
    malformed_events: int = 0
    """Events in them that could not be read."""
    unknown_events: int = 0
    """Events of kinds that are not known here; what they say is passed over."""
    engine_gaps: int = 0
    """Times that an engine's stream had a hole."""
    engine_replays: int = 0
    """Holes and beginnings that its replay has filled."""
    engine_losses: int = 0
    """Times that events were lost for good."""
    engine_restarts: int = 0
    """Other incarnations that an engine's stream or its counters showed."""
