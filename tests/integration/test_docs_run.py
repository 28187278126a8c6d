"""The quick commands of the documentation, as they stand there; the others: ``make test-docs``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from docskit import Block, marked
from docsrun import Place, cluster


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("docs")
    up = cluster(folder)
    yield Place(folder / "here", up)
    up.end()


@pytest.mark.parametrize("block", marked("up"), ids=lambda block: block.name)
def test_it_runs(block: Block, place: Place) -> None:
    assert place.run(block).strip()
