"""What a request costs in this process, stage by stage, without a network.

    python -P bench/stages.py [--requests 256] [--modes text,tokens] [--sizes 100B] [--profile 128K]

    body -> parse -> keys -> work -> decide -> begin -> first -> finish -> tell

Microseconds a request, lower quartiles (so that other work on the machine hardly counts), for
prompts of 100 B, 8 KB, 32 KB and 128 KB, 64 (100 B: 256) of them sent again and again. ``text``: no
tokenizer, blocks of text; ``tokens``: a byte tokenizer whose segment cache has seen the prompts.
Two workers without events:

    deaf      say ``cached_tokens: 0`` whatever they are sent (a canned answer, as in benchmarks)
    honest    have room for a million blocks, more than they are sent, and say what they hold

``--profile SIZE`` prints where the time goes, by function, instead of the table.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
from multidict import CIMultiDict  # noqa: E402
from prometheus_client import CollectorRegistry  # noqa: E402

from gateway import work  # noqa: E402
from gateway.config import GatewayConfig, LedgerConfig  # noqa: E402
from gateway.dashboard.live import Live  # noqa: E402
from gateway.dashboard.recent import Recent  # noqa: E402
from gateway.decision import AttemptEnd, ModelProfile, Route  # noqa: E402
from gateway.exchange import Inbound  # noqa: E402
from gateway.index.table import PrefixTable  # noqa: E402
from gateway.ledger import LedgerSink  # noqa: E402
from gateway.plugins import all_policies  # noqa: E402
from gateway.prompts import Prompts  # noqa: E402
from gateway.records import Outcome  # noqa: E402
from gateway.router import Router  # noqa: E402
from gateway.tally import WorkerTally  # noqa: E402
from gateway.telemetry import PrometheusSink  # noqa: E402
from shared import openai  # noqa: E402
from shared.blocks import GRANULE  # noqa: E402
from shared.bundle import TokenizerBundle  # noqa: E402
from shared.load import WorkerInfo  # noqa: E402
from shared.openai import RouteKind, Usage  # noqa: E402
from shared.render import byte_bundle  # noqa: E402
from shared.types import Epoch, RequestId, WorkerId  # noqa: E402

SIZES = {"100B": 100, "8K": 8 << 10, "32K": 32 << 10, "128K": 128 << 10}
STAGES = ("parse", "keys", "work", "decide", "begin", "first", "finish", "tell")
BLOCKS_HELD = 1_000_000
ROUTE = "/v1/chat/completions"


class Cache:
    """What one honest worker holds: its blocks, the one used longest ago first."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, keys: list[int]) -> int:
        """Tokens of a prompt that were there; it is there now."""
        hit = next((at for at, key in enumerate(keys) if key not in self._held), len(keys))
        for key in reversed(keys):
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > BLOCKS_HELD:
            self._held.popitem(last=False)
        return hit * GRANULE


class Bundles:
    """The one tokenizer there is."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._bundle = bundle

    async def fetch(self, profile: ModelProfile) -> TokenizerBundle:
        """See ``gateway.bundles.BundleSource``."""
        return self._bundle


class Bench:
    """Everything between the listener and the workers, driven by hand."""

    def __init__(self, folder: str, *, tokens: bool, honest: bool) -> None:
        config = GatewayConfig(ledger=LedgerConfig(dir=folder))
        rng = random.Random(1)
        index = PrefixTable(config.routing.index_max_blocks, rng)
        self.router = Router(
            index, all_policies(config.routing), config.routing, rng, time.monotonic
        )
        bundle = byte_bundle()
        self.prompts = Prompts(config.render, b"key", Bundles(bundle))
        for name in ("a", "b"):
            info = WorkerInfo(
                id=WorkerId(name),
                epoch=Epoch(1),
                url=f"http://{name}",
                models=("mock-model",),
                engine="openai",
                blocks_total=BLOCKS_HELD if honest else 0,
                tokenizer=bundle.fingerprint if tokens else "",
                event_feed=False,
            )
            self.router.join(info, time.monotonic())
        registry = CollectorRegistry()
        self.metrics = PrometheusSink(registry, lambda _: True)
        self.ledger = LedgerSink(config.ledger, "stages")
        self.sinks = [self.metrics, WorkerTally(), Live(time.monotonic), self.ledger]
        self.recent = Recent()
        self.config = config
        self.caches = {"a": Cache(), "b": Cache()} if honest else {}
        self.spent: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.count = 0

    async def ready(self) -> None:
        """Load the tokenizer."""
        profile = self.router.profile("mock-model")
        assert profile is not None
        self.prompts.want(profile)
        await self.prompts.settled(30)

    async def serve(self, body: bytes) -> None:
        """One request from its body to its record."""
        self.count += 1
        clock, spent = time.perf_counter, self.spent
        inbound = Inbound(
            request_id=RequestId(f"req-{self.count:024x}"),
            route=ROUTE,
            target=ROUTE,
            headers=CIMultiDict({"Host": "h", "Content-Type": "application/json"}),
            body=body,
            arrived=time.monotonic(),
            wall_at=time.time(),
        )
        t0 = clock()
        request = openai.parse(RouteKind.CHAT, body)
        t1 = clock()
        profile = self.router.profile(request.model or "")
        assert profile is not None
        prompt = await self.prompts.read(request, profile)
        t2 = clock()
        item = work.generation(inbound, request, prompt, self.config)
        t3 = clock()
        route = self.router.decide(item.query, time.monotonic())
        t4 = clock()
        assert isinstance(route, Route)
        lease = self.router.begin(route, time.monotonic(), attempt=1)
        t5 = clock()
        cache = self.caches.get(lease.worker)
        cached = 0 if cache is None else cache.serve(list(prompt.keys))
        total = prompt.n_tokens or len(prompt.keys) * GRANULE or 16
        usage = Usage(16 if cache is None else total, 12, min(cached, total - 1))
        t6 = clock()
        lease.first_token(time.monotonic())
        t7 = clock()
        end = AttemptEnd(
            outcome=Outcome.OK, status=200, usage=usage, route=ROUTE, wall_at=inbound.wall_at
        )
        record = lease.finish(end, time.monotonic())
        t8 = clock()
        for sink in self.sinks:
            sink.record(record)
        self.recent.keep(route, record)
        t9 = clock()
        for stage, seconds in zip(
            STAGES,
            (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4, t7 - t6, t8 - t7, t9 - t8),
            strict=True,
        ):
            spent[stage].append(seconds)


def bodies(size: int, seed: int) -> list[bytes]:
    """Distinct chats of one message each."""
    rng = random.Random(seed)
    made = []
    for _ in range(64 if size > 4096 else 256):
        hexes = f"{rng.getrandbits(4 * size):0{size}x}"
        text = " ".join(hexes[at : at + 7] for at in range(0, size, 7))[:size]
        message = {"role": "user", "content": text}
        made.append(
            msgspec.json.encode(
                {"model": "mock-model", "messages": [message], "max_tokens": 12, "temperature": 0}
            )
        )
    return made


async def measure(bench: Bench, texts: list[bytes], requests: int) -> dict[str, float]:
    """Microseconds by stage; each text has been sent once before."""
    for body in texts:
        await bench.serve(body)
    bench.spent = {stage: [] for stage in STAGES}
    for number in range(requests):
        await bench.serve(texts[number % len(texts)])
    return {stage: statistics.quantiles(seconds)[0] * 1e6 for stage, seconds in bench.spent.items()}


async def run(options: argparse.Namespace) -> None:
    """All sizes and modes."""
    print("mode", "answers", "size", *STAGES, "sum", sep="\t")
    for mode in options.modes.split(","):
        for honest in (answers == "honest" for answers in options.answers.split(",")):
            for size, length in SIZES.items():
                if size not in options.sizes.split(",") or options.profile not in ("", size):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    bench = Bench(folder, tokens=mode == "tokens", honest=honest)
                    await bench.ready()
                    profiler = cProfile.Profile()
                    if options.profile:
                        profiler.enable()
                    medians = await measure(bench, bodies(length, 7), options.requests)
                    profiler.disable()
                    bench.ledger.close()
                    await bench.prompts.close()
                name = "honest" if honest else "deaf"
                figures = [f"{medians[stage]:.1f}" for stage in STAGES]
                total = f"{sum(medians.values()):.1f}"
                print(mode, name, size, *figures, total, sep="\t", flush=True)
                if options.profile:
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main(write: Callable[[str], object] = print) -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--modes", default="text,tokens")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--answers", default="deaf,honest")
    parser.add_argument("--profile", default="", choices=("", *SIZES))
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
