"""``headwater up``: Redis, workers and gateways as one process tree on this machine."""
