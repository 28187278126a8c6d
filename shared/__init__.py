"""What must be identical in the gateway and in the worker: identity, events, wire views, settings."""
