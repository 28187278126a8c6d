"""Batch throughput beside transformers: ``generate()`` and its own continuous batching.

Prompts are random tokens, greedy, a fixed number of new tokens; all contestants hold the same
float32 weights. Each round starts with an empty cache. Starting an engine is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.engine_report import Contest, Row
from worker.drive import Drive, Meter, Spent
from worker.model.measure import clock
from worker.probe import Probe

LOW, HIGH = 17, 49_000
PAGE, BUDGET, PAGES = 16, 512, 1200
NEAR_TIE = 1e-3

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Prompts that arrive together, and what is asked of them."""

    name: str
    prompts: tuple[Prompt, ...]
    new: int
    against_generate: tuple[float, float]
    """Must and goal."""
    against_batching: tuple[float, float]

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return self.new * len(self.prompts)


def workloads(rng: Random) -> list[Workload]:
    """The three that are reported."""

    def some(n: int) -> Prompt:
        return tuple(rng.randrange(LOW, HIGH) for _ in range(n))

    shared = some(768)
    return [
        Workload(
            "16 x (256 + 32 new)", tuple(some(256) for _ in range(16)), 32, (1.1, 1.3), (2.2, 2.5)
        ),
        Workload(
            "8 x (64..484 mixed + 32 new)",
            tuple(some(64 + 60 * i) for i in range(8)),
            32,
            (1.6, 1.8),
            (1.6, 1.8),
        ),
        Workload(
            "8 x (768 shared + 32 + 8 new)",
            tuple(shared + some(32) for _ in range(8)),
            8,
            (4.5, 5.2),
            (2.4, 2.7),
        ),
    ]


class Field:
    """The three contestants; each keeps its last answers."""

    def __init__(self, probe: Probe, plain: Any) -> None:
        self._probe, self._plain = probe, plain
        self.answers: dict[str, list[list[int]]] = {}
        self.computed_prompt_tokens = 0
        transformers.utils.logging.set_verbosity_error()

    def ours(self, load: Workload) -> Spent:
        """Scheduler, pool and runner, no HTTP."""
        drive: Drive = self._probe.drive(budget=BUDGET)
        started = clock()
        asked = [drive.submit(prompt, load.new) for prompt in load.prompts]
        drive.run()
        spent = clock() - started
        self.answers["headwater"] = [answer.tokens for answer in asked]
        self.computed_prompt_tokens = drive.scheduler.counters.computed_tokens
        return spent

    def generate(self, load: Workload) -> Spent:
        """One padded batch, padding on the left, a mask of ones where there is none."""
        width = max(map(len, load.prompts))
        ids = torch.tensor([(0,) * (width - len(p)) + p for p in load.prompts])
        lengths = torch.tensor([len(p) for p in load.prompts])
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        started = clock()
        with torch.inference_mode():
            out = self._plain.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=load.new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        spent = clock() - started
        self.answers["generate"] = out[:, width:].tolist()
        return spent

    def batching(self, load: Workload) -> Spent:
        """transformers' continuous batching, with pages as small as our blocks."""
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=PAGES,
            max_batch_tokens=BUDGET,
            auto_switch_to_flash=False,
        )
        chosen = GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1)
        found: dict[str, list[int]] = {}
        with self._plain.continuous_batching_context_manager(
            chosen, continuous_batching_config=config, timeout=60
        ) as manager:
            started = clock()
            names = manager.add_requests(
                inputs=[list(prompt) for prompt in load.prompts], max_new_tokens=load.new
            )
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended unexpectedly")
            spent = clock() - started
        self.answers["batching"] = [found[name] for name in names]
        return spent

    def differences(self, load: Workload, name: str) -> list[dict[str, Any]]:
        """Where a contestant's answers leave those of ``generate()``, and by what margin."""
        out = []
        for number, (prompt, theirs, mine) in enumerate(
            zip(load.prompts, self.answers["generate"], self.answers[name], strict=True)
        ):
            if mine == theirs:
                continue
            step = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            margin = self._margin((*prompt, *theirs[:step]))
            out.append(
                {
                    "prompt": number,
                    "step": step,
                    "margin": round(margin, 6),
                    "near_tie": margin < NEAR_TIE,
                }
            )
        return out

    def _margin(self, tokens: Sequence[int]) -> float:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = self._plain(
                input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=1
            ).logits[0, -1]
        best = logits.topk(2).values
        return float(best[0] - best[1])


def throughput(probe: Probe, plain: Any, rounds: int, meter: Meter) -> Iterator[Row]:
    """Case a."""
    field = Field(probe, plain)
    for load in workloads(Random(1)):
        contest = Contest.run(
            rounds,
            {
                "generate": lambda load=load: field.generate(load),
                "batching": lambda load=load: field.batching(load),
                "headwater": lambda load=load: field.ours(load),
            },
        )
        apart = {name: field.differences(load, name) for name in ("headwater", "batching")}
        wrong = [d for d in apart["headwater"] if not d["near_tie"]]
        note = f"{len(load.prompts) - len(apart['headwater'])} of {len(load.prompts)} answers equal"
        if apart["headwater"]:
            note += f", {len(apart['headwater']) - len(wrong)} near ties, {len(wrong)} WRONG"
        detail = contest.detail(load.tokens) | {
            "differences": apart,
            "computed_prompt_tokens": field.computed_prompt_tokens,
        }
        for peer, title, (must, goal) in (
            ("generate", "HF generate", load.against_generate),
            ("batching", "transformers' continuous batching", load.against_batching),
        ):
            yield Row(
                "a",
                f"throughput against {title}, {load.name}",
                contest.ratio("headwater", peer, meter),
                must,
                goal,
                by_wall=contest.ratio("headwater", peer, "wall"),
                note=note,
                detail=detail,
            )
