"""The engine that measurements step by hand, over a fake model and a clock that runs on demand."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from shared.errors import ConfigError
from worker.benchmark import Benchmark, Bounds, Sizes
from worker.cli import app
from worker.drive import Drive, Spent
from worker.fake_runner import FakeModel, FakeRunner
from worker.probe import ModelShape, Probe

SMOLLM2 = ModelShape(106_168_320, 49_152 * 576, 30 * 9 * 64, 46_080)


class Bench:
    """A fake runner whose steps take time on a virtual clock."""

    def __init__(self, n_blocks: int = 200, **model: object) -> None:
        self.now = 0.0
        self.runner = FakeRunner(
            FakeModel(
                n_blocks,
                16,
                prefill_s_per_token=1e-3,
                decode_s_per_step=1e-2,
                **model,  # type: ignore[arg-type]
            ),
            sleep=self.sleep,
            clock=lambda: self.now,
            rng=random.Random(1),
        )
        self.probe = Probe(self.runner, self, lambda: Spent(0.75 * self.now, 0.0))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> Spent:
        return Spent(self.now, 0.0)

    def seconds(self) -> float:
        return self.now

    def drive(self, **settings: int) -> Drive:
        return Drive(self.runner, self, **settings)  # type: ignore[arg-type]


def test_pretended_steps_take_no_time_and_real_ones_do() -> None:
    bench = Bench()
    drive = bench.drive(budget=64)
    neighbours = drive.decoders(3, 100, 500, random.Random(1))
    assert bench.now == 0.0
    assert all(answer.at for answer in neighbours)
    seen = [len(answer.tokens) for answer in neighbours]
    drive.step(4)
    assert [len(answer.tokens) for answer in neighbours] == [n + 4 for n in seen]
    assert bench.now == pytest.approx(4 * 1e-2)
    drive.scheduler.check()


def test_a_request_gets_exactly_its_tokens_and_its_gaps_are_seen() -> None:
    bench = Bench()
    drive = bench.drive()
    answer = drive.submit(drive.random(50, random.Random(2)), 5)
    drive.until_first(answer)
    assert len(answer.tokens) == 1
    bench.sleep(7.0)
    drive.run()
    assert (len(answer.tokens), answer.ended) == (5, True)
    assert answer.longest_gap.wall == pytest.approx(7.0 + 1e-2)


def test_a_warm_prompt_is_measured_with_what_it_reuses() -> None:
    cold, warm = Bench().probe.reuse(256, 192)
    assert cold.spent.wall == pytest.approx(256e-3)
    assert warm.spent.wall == pytest.approx(64e-3)
    assert cold.outside() == pytest.approx(0.25)


def test_a_prefix_that_cannot_be_reused_is_no_measurement() -> None:
    with pytest.raises(AssertionError, match="192 tokens were reused, not 200"):
        Bench().probe.reuse(256, 200)


def test_rates_of_decode_and_prefill() -> None:
    probe = Bench().probe
    assert probe.prefill(500).per_s() == pytest.approx(1000)
    assert probe.decode(4, 64, 5).per_s() == pytest.approx(400)


def test_arithmetic_of_reuse() -> None:
    assert SMOLLM2.ideal_ratio(2048, 2000) == pytest.approx(34.2, abs=0.05)
    assert SMOLLM2.prefill_flops(2048) == pytest.approx(580e9, rel=0.01)
    assert SMOLLM2.ideal_ratio(100, 0) == 1


def test_what_does_not_fit_is_told() -> None:
    bench = Bench(n_blocks=40, max_model_len=600)
    bounds = Bounds(1e9, 1e12)
    sizes = Sizes(repeats=1)
    said: list[str] = []
    report = Benchmark(bench.probe, SMOLLM2, bounds, sizes, said.append).run({"device": "cpu"})
    assert [p.tokens for p in report.prefill] == [128, 512]
    assert [d.batch for d in report.decode] == [1]
    assert report.reuse is None
    assert report.skipped == [
        "prefill of 2048: longer than the model's 600",
        *(f"decode at batch {n}: needs {34 * n} KV blocks, 40 are there" for n in (4, 16, 64)),
        "reuse of 2000 tokens: longer than the model's 600",
    ]
    assert len(said) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--benchmark", "--model", "fake"], "model.path: 'fake': .*measures a real model"),
        (["--model", "fake", "--format", "json"], "--format: 'json': only --benchmark"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], message: str) -> None:
    done = CliRunner().invoke(app, flags)
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise done.exception
