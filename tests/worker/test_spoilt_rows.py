"""A sequence that the model can do nothing with fails alone, and what it wrote is not reused."""

from __future__ import annotations

import random

import msgspec
import pytest
from enginerig import Answer, Reference, Rig, SpyRunner, greedy, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.fake_runner import SLOT
from worker.runner import Chunk, StepPlan, StepResult
from worker.sequence import FinishReason, SamplingParams

B = 16
NOTHING = b"\xff" * SLOT
"""Stands for KV that is not a number: whatever reads it is none either."""


class FaultyRunner(SpyRunner):
    """Spoils what it writes at some positions of some sequences, as a faulty device would."""

    faults: frozenset[tuple[str, int]] = frozenset()

    def _write(self, chunk: Chunk, before: bytes) -> None:
        super()._write(chunk, before)
        size = self.block_size
        spoilt = before == NOTHING
        for position in range(chunk.start, chunk.start + len(chunk.tokens)):
            spoilt |= (chunk.seq_id, position) in self.faults
            if spoilt:
                slot = (chunk.blocks[position // size] * size + position % size) * SLOT
                self._slots[slot : slot + SLOT] = NOTHING

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        failed = {
            chunk.seq_id: "not numbers"
            for chunk in plan.chunks
            if chunk.sample and self._last(chunk) == NOTHING
        }
        tokens = {each: token for each, token in result.tokens.items() if each not in failed}
        return msgspec.structs.replace(result, tokens=tokens, failed=failed)

    def _last(self, chunk: Chunk) -> bytes:
        end = chunk.start + len(chunk.tokens)
        return self._read(chunk.blocks, end - 1, end)


def faulty(*faults: tuple[str, int], **more: object) -> Rig:
    rig = Rig(**more)  # type: ignore[arg-type]
    runner = FaultyRunner(rig.model, sleep=rig._sleep, clock=rig._clock, rng=random.Random(1))
    runner.faults = frozenset(faults)
    rig.runner = rig.loop.runner = runner
    return rig


def failed(answer: Answer) -> bool:
    return answer.finish is FinishReason.ERROR and answer.last.error == "not numbers"


@pytest.mark.parametrize("position", [0, 20, 49, 50, 55])
@pytest.mark.parametrize("budget", [7, 64, 512])
def test_only_its_own_sequence_fails(position: int, budget: int) -> None:
    """In the prompt (50 tokens) or in the answer."""
    reference = Reference()
    rig = faulty(("1", position), budget=budget)
    params = [
        greedy(12, ignore_eos=True, logprobs=2),
        greedy(12, ignore_eos=True),
        SamplingParams(max_tokens=12, seed=3, temperature=0.8),
    ]
    asked = {}
    for each, how in enumerate(params):
        job = prompt(random.Random(each), 50), how
        asked[rig.submit(*job)] = job
    rig.run()
    assert failed(rig.answers["1"])
    assert len(rig.answers["1"].tokens) == max(0, position - 49)
    for each in ("0", "2"):
        assert rig.answers[each].outcome == reference.outcome(*asked[each])
    assert rig.loop.failed_steps == 0, "the device is not lost"
    rig.check_idle()
    again = rig.answer(*asked["1"])
    assert again.outcome == reference.outcome(*asked["1"])
    rig.check_idle()


def test_what_good_samples_have_read_stays() -> None:
    rig = faulty(("0", 85))
    tokens = prompt(random.Random(1), 50)
    answer = rig.answer(tokens, greedy(60, ignore_eos=True))
    assert failed(answer)
    longer = (*tokens, *answer.tokens)
    assert rig.answer(longer, greedy(4)).last.cached_tokens == 85 // B * B


def test_spoilt_and_left_behind_by_an_abort() -> None:
    """Nobody has noticed; the first who reads it fails, the second does not."""
    reference = Reference()
    rig = faulty(("0", 20), budget=40)
    tokens = prompt(random.Random(1), 100)
    rig.submit(tokens, greedy(4))
    rig.step()
    rig.loop.abort("0")
    assert failed(rig.answer(tokens, greedy(4)))
    answer = rig.answer(tokens, greedy(4))
    assert answer.outcome == reference.outcome(tokens, greedy(4))
    assert answer.last.cached_tokens == 0
    rig.check_idle()


def test_siblings_that_read_it_fail_each_for_itself() -> None:
    reference = Reference()
    rig = faulty(("0", 20), budget=40)
    shared = prompt(random.Random(1), 60)
    asked = {}
    for each in range(4):
        tokens = shared + prompt(random.Random(each), 30)
        asked[rig.submit(tokens, greedy(4))] = tokens
    rig.run()
    ends = {each: failed(rig.answers[each]) for each in asked}
    assert ends["0"]
    assert sum(ends.values()) > 1, "at least one had taken the prefix already"
    for request_id, tokens in asked.items():
        if not ends[request_id]:
            assert rig.answers[request_id].outcome == reference.outcome(tokens, greedy(4))
    rig.check_idle()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), budget=st.integers(3, 90), n_blocks=st.integers(14, 40))
def test_no_answer_is_made_from_it(data: st.DataObject, budget: int, n_blocks: int) -> None:
    """Under pressure, with shared prefixes and aborts: an answer is right or an error; once the
    faults are over, a failure needs spoilt blocks, and each failure removes them."""
    reference = Reference()
    faults = data.draw(
        st.sets(st.tuples(st.integers(0, 11).map(str), st.integers(0, 140)), max_size=8)
    )
    rig = faulty(*faults, budget=budget, n_blocks=n_blocks)
    asked = {}
    for _ in range(12):
        family, length = data.draw(st.tuples(st.integers(0, 2), st.integers(1, 130)))
        job = prompt(random.Random(family), 200)[:length], greedy(data.draw(st.integers(1, 20)))
        asked[rig.submit(*job)] = job
        for _ in range(data.draw(st.integers(0, 3))):
            rig.loop.step()
            rig.scheduler.check()
        if data.draw(st.booleans()):
            rig.loop.abort(data.draw(st.sampled_from(sorted(asked))))
    while rig.loop.step():
        rig.scheduler.check()
    for request_id, job in asked.items():
        answer = rig.answers[request_id]
        if answer.finish is not FinishReason.ABORT and not failed(answer):
            assert answer.outcome == reference.outcome(*job)
    for job in asked.values():
        answers = [rig.answer(*job) for _ in range(2)]
        assert answers[1].outcome == reference.outcome(*job)
    rig.check_idle()
