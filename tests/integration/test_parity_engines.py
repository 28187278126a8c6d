"""An engine with another chat template behind a gateway: named soon, routed well, healed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from enginekit import emulated, lab
from tokenstub import OTHER_TEMPLATE, renderer_of, with_template

from gateway.parity import Verdict
from gateway.routing.base import Trust
from shared.bytetok import byte_bundle

SYSTEM = "You answer in short sentences, and never twice the same. " * 4


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
async def test_a_wrong_template_is_named_and_costs_no_affinity(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.feeds.parity.FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr("gateway.feeds.parity.LONGEST_PAUSE_S", 0.5)
    other = renderer_of(with_template(byte_bundle(), OTHER_TEMPLATE))

    async def spoil(engines: list[Any]) -> None:
        for one in engines:
            one.renderer = other

    async with lab(tmp_path, *[emulated(engine)] * 3, before=spoil) as at:
        await at.until(lambda: all(at.status(i).parity is Verdict.DIFFERENT for i in range(3)))
        for i in range(3):
            status = at.status(i)
            assert "another template" in status.parity_reason
            assert "--chat-template" in status.parity_fix
            assert status.trust is not Trust.EXACT
        if engine != "llamacpp":  # its events are followed, and not believed
            await at.until(
                lambda: all("tokens differ" in at.status(i).trust_reason for i in range(3))
            )
        first = await at.say(SYSTEM, "one")
        for _ in range(3):
            again = await at.say(SYSTEM, "one")
            assert again.worker == first.worker  # what was routed there is known all the same
            assert again.predicted > 0
            assert (again.cached or 0) > 0
        for one in at.engines:
            one.renderer = renderer_of(byte_bundle())
        await at.until(lambda: all(at.status(i).parity is Verdict.EQUAL for i in range(3)))
        assert all(not at.status(i).parity_reason for i in range(3))
