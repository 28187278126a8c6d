"""Single measurements on an engine without HTTP: prefill, decode, reuse; and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from worker.drive import NO_TIME, Clock, Drive, Meter, Spent
from worker.runner import Runner

UNTIMED = 2
"""Decode steps before the watch starts."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the arithmetic of a dense model depends on."""

    body_weights: int
    """Weights that every token is multiplied with: all matrices but embedding and output head."""
    head_weights: int
    attention_width: int
    """Query heads x (key width + value width) / 2, summed over the layers."""
    kv_bytes_per_token: int

    def prefill_flops(self, total: int, cached: int = 0) -> float:
        """Of the tokens ``cached .. total`` of a prompt, with the logits of the last one."""
        attended = (total * total - cached * cached) / 2
        weights = self.body_weights * (total - cached) + self.head_weights
        return 2.0 * weights + 4.0 * attended * self.attention_width

    def ideal_ratio(self, total: int, cached: int) -> float:
        """How much cheaper a prompt becomes by arithmetic alone when ``cached`` are reused."""
        return self.prefill_flops(total) / self.prefill_flops(total, cached)


@dataclass(frozen=True, slots=True)
class Sample:
    """Some steps: how long they took, and how much of it was the model's forward pass."""

    tokens: int
    spent: Spent
    forward: Spent = NO_TIME

    def per_s(self, meter: Meter = "wall") -> float:
        """Tokens per second."""
        return self.tokens / self.spent.by(meter)

    def outside(self, meter: Meter = "wall") -> float:
        """Share of the time outside the forward pass: planning, batches, sampling, hand-off."""
        return 1.0 - self.forward.by(meter) / self.spent.by(meter)


class Probe:
    """Single measurements on one runner. ``forward`` tells the time spent in forward so far.

    :param blocks: size of the pool; by default all blocks of the runner.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Clock,
        forward: Callable[[], Spent],
        decode: Callable[[Sequence[int]], str] | None = None,
        blocks: int | None = None,
        seed: int = 1,
    ) -> None:
        self.runner, self.clock, self.blocks = runner, clock, blocks
        self._forward, self._decode = forward, decode
        self.rng = Random(seed)

    def drive(self, **settings: object) -> Drive:
        """A fresh engine over the runner."""
        made = {"blocks": self.blocks, **settings}
        return Drive(self.runner, self.clock, self._decode, **made)  # type: ignore[arg-type]

    def timed(self, tokens: int, work: Callable[[], None]) -> Sample:
        """How long ``work`` takes."""
        forward, started = self._forward(), self.clock()
        work()
        return Sample(tokens, self.clock() - started, self._forward() - forward)

    def prefill(self, n: int, budget: int = 512) -> Sample:
        """A prompt of ``n`` tokens, alone, to its first token."""
        drive = self.drive(budget=budget)
        answer = drive.submit(drive.random(n, self.rng), 1)
        return self.timed(n, lambda: drive.until_first(answer))

    def decode(self, batch: int, context: int, steps: int) -> Sample:
        """``batch`` sequences at ``context`` tokens, ``steps`` tokens each."""
        drive = self.drive(budget=batch * context, running=batch)
        drive.decoders(batch, context, 1 + UNTIMED + steps, self.rng)
        drive.step(UNTIMED)
        return self.timed(batch * steps, lambda: drive.step(steps))

    def mixed(self, batch: int, context: int, prompt: int, budget: int = 512) -> Sample:
        """``batch`` decoding sequences while a prompt of ``prompt`` tokens is computed."""
        drive = self.drive(budget=budget, running=batch + 1)
        drive.decoders(batch, context, prompt + 64 * batch, self.rng)
        drive.step(2)
        answer = drive.submit(drive.random(prompt, self.rng), 1)
        sample = self.timed(prompt, lambda: drive.until_first(answer))
        return replace(sample, tokens=prompt)

    def reuse(self, total: int, cached: int, budget: int = 512) -> tuple[Sample, Sample]:
        """First token of a prompt nobody has seen, and of one that shares ``cached`` with it."""
        drive = self.drive(budget=budget)
        prefix = drive.random(cached, self.rng)
        samples = []
        for _ in range(2):
            answer = drive.submit(prefix + drive.random(total - cached, self.rng), 1)
            samples.append(self.timed(total, lambda a=answer: drive.until_first(a)))  # type: ignore[misc]
        if answer.cached != cached:
            raise AssertionError(f"{answer.cached} tokens were reused, not {cached}")
        return samples[0], samples[1]
