"""The quick commands of the documentation, as they stand there; the others: ``make test-docs``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from caserig import GatewayLauncher
from conftest import WorkerProcess, pick_port
from docskit import Block, marked
from docsrun import Cluster, Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, fake_worker: WorkerProcess) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("docs")
    gateways = GatewayLauncher(folder, pick_port)
    gateway = gateways(fake_worker.url)
    yield Place(folder / "here", Cluster(gateway.url, gateway.admin, (fake_worker.url,)))
    gateways.end()


@pytest.mark.parametrize("block", marked("up"), ids=lambda block: block.name)
def test_it_runs(block: Block, place: Place) -> None:
    assert place.run(block).strip()
