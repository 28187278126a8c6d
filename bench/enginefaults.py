"""What goes wrong with an engine: when it is noticed, how it is named, what it costs.

    python -P bench/enginefaults.py                  all faults, on fleets of two emulated engines
    python -P bench/enginefaults.py --only restart

Both engines hold the same chat, then one fault happens to both while a request arrives twice a
second. Printed per fault:

    stated      seconds within which docs/engines/README.md says that it is noticed
    noticed     seconds from the fault until a look at the gateway shows it
    named       reason in GET /admin/workers, ``headwater doctor`` and the log; counters that grew
    wrong       prompt tokens, of 10 requests after that, believed to be cached that were not
    together    of those, requests of one chat that went where the one before went
    trust       at the end

It fails if a fault was noticed later than stated, or if anything wrong was believed afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engines import MODEL, chat, prose, settings_of
from gateway.build import Gateway
from gateway.config import WorkersConfig
from gateway.decision import WorkerStatus
from gateway.emulators import Emulator, Settings
from gateway.emulators.tokenizerfiles import write_tokenizer
from gateway.parity import Verdict
from shared.bytetok import byte_bundle
from shared.logs import configure
from shared.render import Renderer
from shared.settings import LogConfig

FLEET = 2
EVERY_S = 0.5
AFTER = 10
PATIENCE_S = 60.0
INTERVAL = {"workers.health_interval_s": WorkersConfig().health_interval_s, "log.level": "warning"}
"""Engines are looked at as often as without any settings."""
COUNTERS = (
    *("engine_gaps", "engine_replays", "engine_losses", "engine_restarts"),
    *("malformed_frames", "malformed_events"),
)
OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, with the engines that it happens to."""

    name: str
    engine: dict[str, Any]
    happen: Callable[[Emulator], Awaitable[None]]
    seen: Callable[[WorkerStatus, WorkerStatus], bool]
    """Whether a status shows it, beside the one before."""
    stated_s: float
    healed: bool = False
    """It is made good unseen but for a counter: trust need not fall."""
    by_events: bool = False
    """Only what requests leave shows it, so only of an engine that had some."""


def _lose(*, keep: bool) -> Callable[[Emulator], Awaitable[None]]:
    async def lose(engine: Emulator) -> None:
        engine.lose(2, keep=keep)

    return lose


async def _other_template(engine: Emulator) -> None:
    bundle = byte_bundle()
    engine.renderer = Renderer(msgspec.structs.replace(bundle, chat_template=OTHER_TEMPLATE))
    await engine.restart()


async def _close(engine: Emulator) -> None:
    assert engine.publisher is not None
    await engine.publisher.close()
    engine.publisher = None


def _restarted(before: WorkerStatus, now: WorkerStatus) -> bool:
    return now.epoch != before.epoch


def _reason(*words: str) -> Callable[[WorkerStatus, WorkerStatus], bool]:
    return lambda before, now: any(word in now.trust_reason for word in words)


def _restart(**changes: object) -> Callable[[Emulator], Awaitable[None]]:
    return lambda engine: engine.restart(**changes)


VLLM: dict[str, Any] = {"engine": "vllm"}
SGLANG: dict[str, Any] = {"engine": "sglang"}
ALONE: dict[str, Any] = {"engine": "vllm", "replay": False}
FAULTS = (
    Fault("restart, vllm", VLLM, _restart(), _restarted, 3.0),
    Fault("restart, vllm without replay", ALONE, _restart(), _restarted, 3.0),
    Fault("restart, sglang", SGLANG, _restart(), _restarted, 3.0),
    Fault("restart, llamacpp", {"engine": "llamacpp"}, _restart(), _restarted, 3.0, by_events=True),
    Fault(
        "lost events, replay", VLLM, _lose(keep=True), lambda before, now: True, 3.0, healed=True
    ),
    Fault(
        "lost events, no replay",
        ALONE,
        _lose(keep=False),
        _reason("were lost"),
        3.0,
        by_events=True,
    ),
    Fault(
        "another block size, vllm",
        VLLM,
        _restart(block_size=32),
        lambda before, now: now.block_size == 32,
        3.0,
    ),
    Fault(
        "another block size, sglang",
        SGLANG,
        _restart(block_size=64),
        lambda before, now: now.block_size == 64,
        3.0,
    ),
    Fault("another encoding", VLLM, _restart(form="array"), _restarted, 3.0),
    Fault(
        "an encoding nobody knows",
        VLLM,
        _restart(form="garbage"),
        _reason("cannot be read"),
        3.0,
        by_events=True,
    ),
    Fault(
        "another chat template",
        VLLM,
        _other_template,
        lambda before, now: now.parity is Verdict.DIFFERENT,
        10.0,
    ),
    Fault("event port closed", VLLM, _close, _reason("nobody publishes"), 3.0),
)


class Bench:
    """A gateway, two engines, and one chat at a time."""

    def __init__(
        self, fault: Fault, gateway: Gateway, fleet: list[Emulator], log: io.StringIO
    ) -> None:
        self.fault, self.gateway, self.fleet, self._log = fault, gateway, fleet, log
        self._rng = random.Random(1)
        self._system = prose(self._rng, 900)
        self._places: list[str] = []
        self.wrong = 0

    def statuses(self) -> list[WorkerStatus]:
        """In the order of their names."""
        now = asyncio.get_running_loop().time()
        return sorted(self.gateway.router.workers(now), key=lambda one: str(one.id))

    def counters(self) -> dict[str, int]:
        """What the background side has counted."""
        return {name: getattr(self.gateway.feeds.stats, name) for name in COUNTERS}

    async def say(self, session: aiohttp.ClientSession, *, count: bool) -> None:
        """One request: the same system prompt, another question."""
        history = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": prose(self._rng, 200)},
        ]
        _, usage, headers, _ = await chat(session, self.gateway.url, history, 8)
        lower = {name.lower(): value for name, value in headers.items()}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if count:
            # A block of text is known to within its size.
            missing = int(lower["x-headwater-matched-tokens"]) - cached
            self.wrong += missing if missing >= self.fleet[0].settings.block_size else 0
            self._places.append(lower["x-headwater-worker"])

    async def believed(self) -> None:
        """Wait until all engines are believed as far as they can be."""
        most = "exact" if self.fleet[0].settings.publishes else "learned"
        for _ in range(400):
            if [str(one.trust) for one in self.statuses()] == [most] * FLEET:
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"{self.fault.name}: the engines are not believed: {self.statuses()}")

    async def noticed(self, session: aiohttp.ClientSession) -> float:
        """Let it happen; seconds until it shows, under a steady trickle of requests."""
        clock = asyncio.get_running_loop().time
        before, counted = self.statuses(), self.counters()
        begun = asked = clock()
        for engine in self.fleet:
            await self.fault.happen(engine)
        while clock() - begun < PATIENCE_S:
            shown = [self.fault.seen(*pair) for pair in zip(before, self.statuses(), strict=True)]
            enough = any(shown) if self.fault.by_events else all(shown)
            if enough and (not self.fault.healed or self.counters() != counted):
                return clock() - begun
            if clock() - asked >= EVERY_S:
                asked = clock()
                await self.say(session, count=False)
            await asyncio.sleep(0.02)
        raise SystemExit(f"{self.fault.name}: not noticed within {PATIENCE_S:g} s")

    async def run(self) -> dict[str, Any]:
        """One row."""
        async with aiohttp.ClientSession() as session:
            await self.believed()
            for _ in range(4):
                await self.say(session, count=False)
            # Nobody restarts an engine between two looks at it.
            await asyncio.sleep(2 * WorkersConfig().health_interval_s)
            counted = self.counters()
            told = self._log.tell()
            took_s = await self.noticed(session)
            for _ in range(AFTER):
                await self.say(session, count=True)
                await asyncio.sleep(0.1)
        grown = [name for name, value in self.counters().items() if value > counted[name]]
        self._log.seek(told)
        logged = [json.loads(line).get("reason", "") for line in self._log]
        reasons = [why for one in self.statuses() for why in (one.parity_reason, one.trust_reason)]
        pairs = zip(self._places, self._places[1:], strict=False)
        return {
            "fault": self.fault.name,
            "stated_s": self.fault.stated_s,
            "noticed_s": took_s,
            "named": [name for name in dict.fromkeys([*logged, *reasons]) if name],
            "counters": grown,
            "wrong_tokens": self.wrong,
            "together": sum(a == b for a, b in pairs),
            "trust": sorted({str(one.trust) for one in self.statuses()}),
        }


async def one(fault: Fault, tokenizer: Path) -> dict[str, Any]:
    """A fleet, a gateway, and the fault."""
    log = io.StringIO()
    configure(LogConfig(level="warning", format="json"), log)
    fleet = [Emulator(replace(Settings(model=MODEL), **fault.engine)) for _ in range(FLEET)]
    for emulator in fleet:
        await emulator.start()
    gateway = Gateway(settings_of(fleet, tokenizer, **INTERVAL))
    try:
        await gateway.start()
        await gateway.until_ready()
        return await Bench(fault, gateway, fleet, log).run()
    finally:
        await gateway.close()
        for emulator in fleet:
            await emulator.stop()


def show(rows: list[dict[str, Any]]) -> None:
    """The table in Markdown."""
    print("| fault | stated | noticed | named | counters | wrong | together | trust after |")
    print("|---" * 8 + "|")
    for row in rows:
        cells = [
            row["fault"],
            f"{row['stated_s']:g} s",
            f"{row['noticed_s']:.2f} s",
            "; ".join(name[:60] for name in row["named"]),
            ", ".join(row["counters"]),
            str(row["wrong_tokens"]),
            f"{row['together']} of {AFTER - 1}",
            "/".join(row["trust"]),
        ]
        print("| " + " | ".join(cells) + " |")


async def main(only: str) -> int:
    """All rows; 1 if one is not as stated."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(byte_bundle(), Path(folder))
        for fault in FAULTS:
            if only in fault.name:
                rows.append(await one(fault, tokenizer))
                print(json.dumps(rows[-1]), flush=True)
    show(rows)
    bad = [r for r in rows if r["noticed_s"] > r["stated_s"] or r["wrong_tokens"]]
    return bool(bad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a fault's name")
    sys.exit(asyncio.run(main(parser.parse_args().only)))
