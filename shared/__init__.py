"""What gateway and worker must agree on: identity, events, wire views, settings."""
