"""F05: whatever switches affinity off is named, per worker, and every look-up is counted by why.

One precondition is broken at a time, on engines of another make and on E. Requests go on being
answered in each case: only what G tells about itself can show it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from caserig import GatewayLauncher, metrics, settles, wait_until
from conftest import WorkerLauncher
from enginekit import emulated, lab
from hypothesis import given
from hypothesis import strategies as st
from rig import ask
from tokenstub import OTHER_TEMPLATE, renderer_of, with_template

from gateway.records import TokenFlow
from gateway.routing.base import Trust
from gateway.telemetry import lookup
from shared.bytetok import byte_bundle

SYSTEM = "You answer in short sentences, and never twice the same. " * 6


async def other_template(engines: list[Any]) -> None:
    for one in engines:
        one.renderer = renderer_of(with_template(byte_bundle(), OTHER_TEMPLATE))


BROKEN: dict[str, tuple[dict[str, Any], Any, str]] = {
    # settings of the engines, what is done to them, words in /ready
    "wrong template": ({}, other_template, "tokens differ"),
    "nothing is told": ({"events": False, "report": False}, None, "never reports cached_tokens"),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_what_is_broken_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.feeds.parity.FIRST_PAUSE_S", 0.1)
    engine, before, words = BROKEN[what]
    async with lab(tmp_path, *[emulated("vllm", **engine)] * 2, before=before) as at:
        for n in range(48):
            await at.say(SYSTEM + f"{n % 4}", "one")

        async def named() -> bool:
            return words in str((await ask(at.gateway.url, "/ready")).json["notes"])

        await settles(named, 20)
        gauges = await metrics(at.gateway.admin_url)
        for place, one in enumerate(at.engines):
            assert at.status(place).trust is not Trust.EXACT
            exact = frozenset({("worker", one.id), ("state", "exact")})
            assert gauges["headwater_worker_trust", exact] == 0
        await closes(at.gateway.admin_url, 48)


async def test_an_odd_block_size_breaks_nothing(tmp_path: Path) -> None:
    async with lab(tmp_path, emulated("vllm", block_size=24)) as at:
        await at.until(at.exact)
        await at.say(SYSTEM, "one")
        await at.until(lambda: at.status().index_blocks > 0)
        assert (await at.say(SYSTEM, "one")).predicted > 0
        assert (await closes(at.gateway.admin_url, 2))["chosen"] == 1


async def test_each_look_up_is_counted_once_by_why(tmp_path: Path) -> None:
    """A gateway that has just been started knows nothing yet of what an engine without events has;
    short prompts and engines that are passed over count apart."""
    fleet = [emulated("llamacpp", slots=2)] * 2
    async with lab(tmp_path, *fleet, **{"routing.policy": "round_robin"}) as at:
        for n in range(4):
            await at.say(SYSTEM + f"{n // 2} " * 40, "one")
        assert (await closes(at.gateway.admin_url, 4))["nothing_known"] >= 1
        body = {"model": at.engines[0].settings.model, "prompt": "hi", "max_tokens": 1}
        assert (await ask(at.gateway.url, "/v1/completions", body)).status == 200
        found = await closes(at.gateway.admin_url, 5)
        assert found["too_short"] == 1
        assert found["not_chosen"] >= 1
        refused = await ask(at.gateway.url, "/v1/completions", {**body, "model": "none"})
        assert refused.status == 404
        await closes(at.gateway.admin_url, 5)


def test_a_worker_without_a_cache_and_a_redis_that_is_not_there(
    worker_process: WorkerLauncher, gateway_process: GatewayLauncher, free_port: Any
) -> None:
    worker = worker_process(env={"HEADWATER_CACHE__PREFIX_CACHE": "false"})
    gateway = gateway_process(worker.url, redis=f"redis://127.0.0.1:{free_port()}/0")

    def notes() -> str:
        return str(gateway.http.get(f"{gateway.url}/ready").json()["notes"])

    wait_until(lambda: "redis is not used" in notes() and "prefix cache" in notes())
    assert gateway.workers()[0]["trust"] == "blind"
    page = gateway.http.get(f"{gateway.admin}/metrics").text
    assert "headwater_redis_up 0.0" in page
    shown = [line for line in page.splitlines() if line.startswith("headwater_worker_trust{")]
    assert [line for line in shown if line.endswith(" 1.0") and 'state="blind"' in line]


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_any_flow_has_a_reason(tail: int, cold: int, captured: int, elsewhere: int) -> None:
    available = captured + elsewhere
    flow = TokenFlow(
        prompt=tail + cold + available,
        tail=tail,
        cold=cold,
        available=available,
        captured=captured,
        diverted_for_load=elsewhere,
        unreported=captured,
    )
    expected = {
        "too_short": cold + available == 0,
        "nothing_known": cold > 0 and available == 0,
        "not_chosen": elsewhere > 0 and captured == 0,
        "chosen": captured > 0,
    }
    assert [result for result, is_it in expected.items() if is_it] == [lookup(flow)]


async def closes(admin: str, requests: int) -> Counter[str]:
    """The look-ups add up to the requests; how many there are of each kind."""
    found: Counter[str] = Counter()
    for (name, labels), value in (await metrics(admin)).items():
        if name == "headwater_lookups_total":
            found[dict(labels)["result"]] += int(value)
    assert found.total() == requests
    return found
