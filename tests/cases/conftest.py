"""Fixtures of the cases: those of the integration tests, and gateways as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from caserig import GatewayLauncher
from integration.conftest import dial, log, serve, stub

__all__ = ["dial", "gateway_process", "log", "serve", "stub"]


@pytest.fixture
def gateway_process(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[GatewayLauncher]:
    """``gateway_process(worker_url, ..., redis="none", env={})`` starts one more gateway."""
    launcher = GatewayLauncher(tmp_path, free_port)
    yield launcher
    launcher.end()
