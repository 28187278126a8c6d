"""What stands in ``examples/`` works with the code as it is."""

from __future__ import annotations

from pathlib import Path

from gateway.config import GatewayConfig
from shared.settings import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_example_configuration_is_valid() -> None:
    config = load(GatewayConfig, file=EXAMPLES / "gateway.toml", env={}, flags={})
    assert len(config.workers.urls) == 2
    assert config.redis.url.startswith("redis://")
