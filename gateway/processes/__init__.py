"""``headwater gateway --processes N``: N gateways on one port, one admin listener for all."""
