"""The slower commands of the documentation, and the first steps with the real model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docskit import ROOT, Block, marked
from docsrun import MODEL, Cluster, Place, local_cluster, some_traffic

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWATER_LEDGER__TRACE", "true")  # as docs/simulate.md asks for
        patch.setenv("HEADWATER_ROUTING__ALLOW_POLICY_HEADER", "true")  # and docs/bench.md
        up = local_cluster(folder)
    made = Place(folder / "here", Cluster.of(up))
    some_traffic(up, made)
    yield made
    up.end()


@pytest.mark.parametrize("block", marked("slow up"), ids=lambda block: block.name)
def test_it_runs(block: Block, place: Place) -> None:
    place.run(block)


@pytest.mark.parametrize("block", marked("slow alone"), ids=lambda block: block.name)
def test_it_runs_alone(block: Block, tmp_path: Path) -> None:
    assert Place(tmp_path / "here", None).run(block).strip()


def test_the_readmes_two_turns_with_the_real_model(tmp_path: Path) -> None:
    from uprig import Up

    up = Up(tmp_path, "--redis", "none", real=True)
    try:
        up.await_line("ready ", 600)
        place = Place(tmp_path / "here", Cluster.of(up), MODEL)
        first, second = (place.run(one) for one in marked("up") if one.page.name == "README.md")
    finally:
        up.end()
    page = (ROOT / "README.md").read_text()
    assert "Paris" in first
    for name in ("prompt", "matched"):
        told = re.search(rf"x-headwater-{name}-tokens: \d+", page)
        assert told is not None
        assert told[0] in second
    shown = re.search(r'"cached_tokens":\d+', page)
    assert shown is not None
    assert shown[0] in second.replace(" ", "")
