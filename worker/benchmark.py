"""``headwater worker --benchmark``: what this worker does a second on this machine, no server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.table import Table

from worker.probe import UNTIMED, ModelShape, Probe, Sample
from worker.runner import Runner

BUSY = 0.9
"""Below this share of one core per thread, other work on the machine spoils the figures."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, as far as the pool and the model's longest sequence permit."""

    prefills: tuple[int, ...] = (128, 512, 2048)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    context: int = 512
    steps: int = 8
    reuse: tuple[int, int] = (2048, 2000)
    """Tokens of a prompt, and how many of them are in the cache."""
    repeats: int = 3
    """The best counts."""

    def blocks(self, block_size: int) -> int:
        """Blocks in which everything fits."""
        decodes = (_decode_blocks(batch, self, block_size) for batch in self.batches)
        prompts = (_prompt_blocks(n, block_size) for n in self.prefills)
        return max(*decodes, *prompts, _reuse_blocks(self.reuse, block_size))


class Bounds(msgspec.Struct, frozen=True):
    """What the machine gives to so many threads."""

    read_bytes_per_s: float
    gemm_flop_per_s: float


class Prefill(msgspec.Struct, frozen=True):
    """A prompt alone, to its first token."""

    tokens: int
    seconds: float
    tokens_per_s: float
    outside_forward: float
    """Share of the time."""
    of_gemm_rate: float | None
    """Its arithmetic per second, relative to that of a large matrix product."""


class Decode(msgspec.Struct, frozen=True):
    """So many sequences that decode side by side."""

    batch: int
    context: int
    tokens_per_s: float
    step_s: float
    outside_forward: float
    """Share of the time."""


class Reuse(msgspec.Struct, frozen=True):
    """The first token of a prompt, cold and with most of it in the cache."""

    tokens: int
    cached: int
    cold_s: float
    warm_s: float
    ratio: float
    ideal_ratio: float | None
    """By arithmetic alone; None for a mixture of experts."""


class Report(msgspec.Struct, frozen=True):
    """Everything that was measured; times are by wall clock, the best of several."""

    about: dict[str, str | int]
    bounds: Bounds
    prefill: list[Prefill]
    decode: list[Decode]
    reuse: Reuse | None
    skipped: list[str]
    """What did not fit, and why."""
    cpu_share: float
    """CPU seconds per second and thread: well below 1 on a CPU, the machine was busy."""


@dataclass
class Benchmark:
    """Measures all sizes that fit. ``say`` is told in one line what is measured now."""

    probe: Probe
    shape: ModelShape | None
    bounds: Bounds
    sizes: Sizes
    say: Callable[[str], None]
    budget: int = 512
    caching: bool = True
    threads: int = 1

    def run(self, about: dict[str, str | int]) -> Report:
        """The whole report; ``about`` is handed through."""
        room = _Room(self.probe.runner, self.probe.blocks or self.probe.runner.n_blocks)
        started = self.probe.clock()
        prefills = [self._prefill(n) for n in self.sizes.prefills if room.for_prompt(n)]
        batches = [b for b in self.sizes.batches if room.for_batch(b, self.sizes)]
        decodes = [self._decode(batch) for batch in batches]
        reused = self._reuse() if room.for_reuse(self.sizes.reuse, self.caching) else None
        spent = self.probe.clock() - started
        share = spent.cpu / spent.wall / self.threads
        return Report(about, self.bounds, prefills, decodes, reused, room.skipped, share)

    def _best(self, measured: Callable[[], Sample]) -> Sample:
        samples = (measured() for _ in range(self.sizes.repeats))
        return min(samples, key=lambda sample: sample.spent.wall)

    def _prefill(self, tokens: int) -> Prefill:
        self.say(f"prefill of {tokens} tokens")
        sample = self._best(lambda: self.probe.prefill(tokens, self.budget))
        share = None
        if self.shape is not None:
            flops = self.shape.prefill_flops(tokens)
            share = flops / sample.spent.wall / self.bounds.gemm_flop_per_s
        return Prefill(tokens, sample.spent.wall, sample.per_s(), sample.outside(), share)

    def _decode(self, batch: int) -> Decode:
        self.say(f"decode at batch {batch}")
        context, steps = self.sizes.context, self.sizes.steps
        sample = self._best(lambda: self.probe.decode(batch, context, steps))
        return Decode(batch, context, sample.per_s(), sample.spent.wall / steps, sample.outside())

    def _reuse(self) -> Reuse:
        total, cached = self.sizes.reuse
        self.say(f"first token with {cached} of {total} tokens cached")
        pairs = [self.probe.reuse(total, cached, self.budget) for _ in range(self.sizes.repeats)]
        cold, warm = (min(pair[i].spent.wall for pair in pairs) for i in (0, 1))
        ideal = None if self.shape is None else self.shape.ideal_ratio(total, cached)
        return Reuse(total, cached, cold, warm, cold / warm, ideal)


@dataclass(frozen=True, slots=True)
class _Room:
    """What fits; the rest is noted in ``skipped``."""

    runner: Runner
    blocks: int
    skipped: list[str] = field(default_factory=list)

    def for_prompt(self, n: int) -> bool:
        return self._fits(f"prefill of {n}", n + 1, _prompt_blocks(n, self.runner.block_size))

    def for_batch(self, batch: int, sizes: Sizes) -> bool:
        longest = sizes.context + UNTIMED + sizes.steps + 1
        needed = _decode_blocks(batch, sizes, self.runner.block_size)
        return self._fits(f"decode at batch {batch}", longest, needed)

    def for_reuse(self, reuse: tuple[int, int], caching: bool) -> bool:
        total, cached = reuse
        what, size = f"reuse of {cached} tokens", self.runner.block_size
        if not caching or cached % size:
            why = f"no multiple of the block size {size}" if caching else "the prefix cache is off"
            self.skipped.append(f"{what}: {why}")
            return False
        return self._fits(what, total + 1, _reuse_blocks(reuse, size))

    def _fits(self, what: str, tokens: int, blocks: int) -> bool:
        if tokens > self.runner.max_model_len:
            self.skipped.append(f"{what}: longer than the model's {self.runner.max_model_len}")
            return False
        if blocks > self.blocks:
            self.skipped.append(f"{what}: needs {blocks} KV blocks, {self.blocks} are there")
            return False
        return True


def _prompt_blocks(tokens: int, block_size: int) -> int:
    return -(-(tokens + 1) // block_size)


def _decode_blocks(batch: int, sizes: Sizes, block_size: int) -> int:
    """With one more for each, which the scheduler wants to see before it admits."""
    return batch * (_prompt_blocks(sizes.context + UNTIMED + sizes.steps, block_size) + 1)


def _reuse_blocks(reuse: tuple[int, int], block_size: int) -> int:
    total, cached = reuse
    return _prompt_blocks(total, block_size) + _prompt_blocks(total - cached, block_size)


def render(report: Report, console: Console) -> None:
    """As a table for people."""
    table = Table(title="headwater worker --benchmark", title_justify="left")
    for name in ("", "tok/s", "time", "outside forward", ""):
        table.add_column(name, justify="left" if not name else "right")
    for p in report.prefill:
        share = "" if p.of_gemm_rate is None else f"{p.of_gemm_rate:.0%} of GEMM rate"
        rate, outside = f"{p.tokens_per_s:,.0f}", f"{p.outside_forward:.1%}"
        table.add_row(f"prefill of {p.tokens}", rate, _time(p.seconds), outside, share)
    for d in report.decode:
        rate, outside = f"{d.tokens_per_s:,.1f}", f"{d.outside_forward:.1%}"
        what = f"decode {d.batch} x {d.context}"
        table.add_row(what, rate, f"{_time(d.step_s)} a step", outside, "")
    if report.reuse is not None:
        r = report.reuse
        ideal = "" if r.ideal_ratio is None else f" (arithmetic: {r.ideal_ratio:.1f}x)"
        table.add_row(f"first token of {r.tokens}, cold", "", _time(r.cold_s), "", "")
        faster = f"{r.ratio:.1f}x faster{ideal}"
        table.add_row(f"same, {r.cached} cached", "", _time(r.warm_s), "", faster)
    console.print(table)
    console.print(
        f"bounds: memory read {report.bounds.read_bytes_per_s / 1e9:,.1f} GB/s, matrix product "
        f"{report.bounds.gemm_flop_per_s / 1e9:,.0f} GFLOP/s"
    )
    console.print(", ".join(f"{name} {value}" for name, value in report.about.items()))
    for line in report.skipped:
        console.print(f"skipped: {line}")
    if report.about["device"] == "cpu" and report.cpu_share < BUSY:
        console.print(
            f"The machine was busy: this process got {report.cpu_share:.0%} of the CPU time it "
            "wanted, and the figures are too low."
        )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
