"""What a host tier does for conversations that do not fit the KV pool: reuse and TTFT.

    python bench/hosttier.py [--conversations 40] [--turns 6] [--blocks 400]

Scheduler and pool are real, the model is the fake one on a virtual clock, so the figures are the
same on every machine: hit rates are counts, times are modelled (150 us a prefill token, 5 ms a
decode step). The last table says what the statistics of block lifetimes cost, in CPU seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from shared.lifetimes import Lifetimes  # noqa: E402
from shared.paging import BlockPool  # noqa: E402
from worker.fake_runner import FakeModel, FakeRunner  # noqa: E402
from worker.scheduler import Scheduler  # noqa: E402
from worker.sequence import SamplingParams, Sequence  # noqa: E402

BLOCK = 16
ANSWER = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@dataclass
class Outcome:
    """Counts and times of one run."""

    prompt_tokens: int = 0
    cached: int = 0
    from_host: int = 0
    ttft_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> str:
        """One line of the table."""
        hit, host = self.cached / self.prompt_tokens, self.from_host / self.prompt_tokens
        mean, median = statistics.mean(self.ttft_s), statistics.median(self.ttft_s)
        return f"{hit:8.1%} {host:9.1%} {1e3 * mean:9.0f} {1e3 * median:9.0f} {self.seconds:9.1f}"


class Lab:
    """One engine on a virtual clock, four requests at a time."""

    def __init__(self, blocks: int, host_blocks: int, copy_us: float) -> None:
        self.now = 0.0
        model = FakeModel(
            blocks,
            BLOCK,
            prefill_s_per_token=150e-6,
            decode_s_per_step=5e-3,
            host_blocks=host_blocks,
            copy_s_per_block=copy_us / 1e6,
        )
        self.runner = FakeRunner(
            model, sleep=self._sleep, clock=lambda: self.now, rng=random.Random(1)
        )
        self.scheduler = Scheduler(
            BlockPool(blocks, BLOCK, host_blocks=host_blocks),
            max_batch_tokens=512,
            max_running=16,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            max_waiting=1000,
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def serve(self, histories: list[list[int]], turns: int, rng: random.Random) -> Outcome:
        """Each conversation asks ``turns`` times, in a random order, four at a time."""
        out = Outcome()
        order = [each for each in range(len(histories)) for _ in range(turns)]
        rng.shuffle(order)
        open_turns: dict[int, tuple[Sequence, float]] = {}
        while order or open_turns:
            for each in [each for each in order[:8] if each not in open_turns]:
                if len(open_turns) < 4 and each not in open_turns:
                    order.remove(each)
                    open_turns[each] = (self._ask(histories[each], out, rng), self.now)
            self._step(open_turns, histories, out)
        out.cached = self.scheduler.counters.cached_tokens
        out.from_host = self.scheduler.counters.host_tokens
        out.seconds = self.now
        return out

    def _ask(self, history: list[int], out: Outcome, rng: random.Random) -> Sequence:
        history.extend(rng.choices(range(97, 123), k=rng.randint(40, 200)))
        out.prompt_tokens += len(history)
        name = str(len(out.ttft_s)) + "-" + str(out.prompt_tokens)
        seq = Sequence(name, list(history), len(history), ANSWER, b"r" * 16, self.now)
        self.scheduler.add(seq)
        return seq

    def _step(
        self,
        open_turns: dict[int, tuple[Sequence, float]],
        histories: list[list[int]],
        out: Outcome,
    ) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        self.scheduler.commit(plan, self.runner.run(plan))
        for each, (seq, asked) in list(open_turns.items()):
            if seq.output_len == 1:
                out.ttft_s.append(self.now - asked)
            if seq.finish is not None:
                histories[each] = list(seq.tokens)
                del open_turns[each]


def tier_table(args: argparse.Namespace) -> None:
    """Reuse and times by size of host memory and pace of its copies."""
    print("host   copy us/block   cached  of it host  TTFT mean    median ms  total s")
    for times, copy_us in (
        (0, 0.0),
        (2, 100.0),
        (4, 100.0),
        (2, 1_000.0),
        (4, 1_000.0),
        (4, 5_000.0),
    ):
        rng = random.Random(7)
        histories = [rng.choices(range(97, 123), k=200) for _ in range(args.conversations)]
        lab = Lab(args.blocks, times * args.blocks, copy_us)
        print(f"{times}x {copy_us:15.0f} {lab.serve(histories, args.turns, rng).row()}")


def lifetimes_cost(args: argparse.Namespace) -> None:
    """CPU time of the statistics, per request that reuses a path of a hundred blocks."""
    lifetimes, path = Lifetimes(args.blocks), list(range(100))
    started, rounds = time.process_time(), 2_000
    for each in range(rounds):
        lifetimes.tick(float(each))
        lifetimes.found(path)
        for block in path:
            lifetimes.idle(block)
    events = (time.process_time() - started) / rounds
    started = time.process_time()
    for _ in range(rounds):
        for block in path:
            lifetimes.evicted(block)
    evictions = (time.process_time() - started) / rounds
    print(f"\nlifetimes, 100 blocks found and given back: {1e6 * events:.1f} us CPU")
    print(f"lifetimes, 100 blocks evicted: {1e6 * evictions:.1f} us CPU")


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=400)
    args = parser.parse_args()
    tier_table(args)
    lifetimes_cost(args)


if __name__ == "__main__":
    main()
