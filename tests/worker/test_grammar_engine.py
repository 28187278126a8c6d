"""Answers under a grammar through scheduler and steps: ends, limits, batches, preemption."""

from __future__ import annotations

import random
from typing import Annotated, Literal

import msgspec
import pytest
from enginerig import Rig, greedy, prompt

from shared.bytetok import byte_bundle
from worker.grammar import GrammarCompiler
from worker.guide import Grammar, GrammarSpec, Guide
from worker.sequence import FinishReason, SamplingParams

pytest.importorskip("llguidance")


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    """What the schema below describes."""

    name: Annotated[str, msgspec.Meta(max_length=6)]
    size: Literal["s", "m", "l"]
    count: Annotated[int, msgspec.Meta(ge=0, le=99)]
    tags: Annotated[list[bool], msgspec.Meta(max_length=4)]


COMPILER = GrammarCompiler(byte_bundle().tokenizer_json, 259, (257,))
SCHEMA = msgspec.json.encode(msgspec.json.schema(Thing)).decode()


def regex(source: str) -> Grammar:
    return COMPILER.compile(GrammarSpec("regex", source, "guided_regex"))


def thing() -> Grammar:
    return COMPILER.compile(GrammarSpec("json", SCHEMA, "response_format"))


def sampled(seed: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=400, temperature=1.0, seed=seed, **more)  # type: ignore[arg-type]


def test_a_hundred_answers_follow_their_schema() -> None:
    rng = random.Random(1)
    rig = Rig(n_blocks=2000)
    ids = [
        rig.submit(prompt(rng, rng.randrange(1, 90)), sampled(each), grammar=thing())
        for each in range(100)
    ]
    rig.run()
    for each in ids:
        answer = rig.answers[each]
        assert answer.finish is FinishReason.STOP
        msgspec.json.decode(answer.text, type=Thing)
    assert len({rig.answers[each].text for each in ids}) > 90
    rig.check_idle()


@pytest.mark.parametrize("blocks", [24, 40])
def test_batch_and_preemption_change_nothing(blocks: int) -> None:
    rng = random.Random(2)
    jobs = [(prompt(rng, rng.randrange(20, 90)), sampled(each)) for each in range(16)]
    alone = []
    for tokens, params in jobs:
        rig = Rig(n_blocks=600, caching=False)
        request_id = rig.submit(tokens, params, grammar=thing())
        rig.run()
        alone.append(rig.answers[request_id].outcome)
    small = Rig(n_blocks=blocks)
    ids = [small.submit(*job, grammar=thing()) for job in jobs]
    free = [small.submit(prompt(rng, 30), greedy(60, ignore_eos=True)) for _ in range(8)]
    while small.loop.step():
        small.scheduler.check()
    assert small.scheduler.counters.preemptions > 0
    assert [small.answers[each].outcome for each in ids] == alone
    assert all(len(small.answers[each].tokens) == 60 for each in free)
    small.check_idle()


def test_the_end_of_the_grammar_ends_the_answer_without_an_end_token() -> None:
    rig = Rig()
    request_id = rig.submit(prompt(random.Random(1), 9), greedy(50), grammar=regex("abc"))
    rig.run()
    answer = rig.answers[request_id]
    assert (answer.text, answer.finish) == ("abc", FinishReason.STOP)
    assert (answer.tokens, answer.last.stop_reason) == (list(b"abc"), None)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_empty_answer(ignore_eos: bool) -> None:
    rig = Rig()
    params = greedy(50, ignore_eos=ignore_eos)
    request_id = rig.submit(prompt(random.Random(1), 9), params, grammar=regex(""))
    rig.run()
    answer = rig.answers[request_id]
    assert (answer.text, answer.finish) == ("", FinishReason.STOP)
    assert answer.tokens == [257]


def test_a_grammar_that_goes_on_stops_at_the_limit_the_end_token_or_a_stop_string() -> None:
    rig = Rig(eos_every=2)
    tokens = prompt(random.Random(3), 20)
    jobs = {
        "limit": greedy(40, ignore_eos=True),
        "least": greedy(40, min_tokens=30),
        "eos": greedy(400),
        "stop": greedy(400, ignore_eos=True, stop=("ba",)),
        "token": greedy(400, ignore_eos=True, stop_token_ids=(ord("b"),), min_tokens=5),
    }
    ids = {name: rig.submit(tokens, p, grammar=regex("[ab]*")) for name, p in jobs.items()}
    rig.run()
    answers = {name: rig.answers[each] for name, each in ids.items()}
    assert answers["limit"].finish is FinishReason.LENGTH
    assert len(answers["limit"].text) == 40
    assert 30 <= answers["least"].last.output_tokens <= 40
    assert answers["eos"].tokens[-1] == 257
    assert answers["eos"].last.stop_reason == 257
    assert answers["stop"].last.stop_reason == "ba"
    assert "ba" not in answers["stop"].text
    assert answers["token"].last.stop_reason == ord("b")
    assert answers["token"].text[:5] == "aaaaa"
    assert all(set(answer.text) <= {"a", "b"} for answer in answers.values())
    assert answers["eos"].finish is answers["stop"].finish is FinishReason.STOP


def test_min_tokens_beyond_what_the_grammar_allows_does_not_hang() -> None:
    rig = Rig()
    tokens = prompt(random.Random(3), 20)
    once = rig.submit(tokens, greedy(40, min_tokens=30), grammar=regex("abc"))
    maybe = rig.submit(tokens, greedy(40, min_tokens=30), grammar=regex("a{0,3}"))
    rig.run()
    assert (rig.answers[once].text, rig.answers[once].finish) == ("abc", FinishReason.STOP)
    assert (rig.answers[maybe].text, rig.answers[maybe].finish) == ("aaa", FinishReason.STOP)


def test_the_limit_cuts_an_answer_short() -> None:
    rig = Rig()
    request_id = rig.submit(prompt(random.Random(3), 20), greedy(5), grammar=thing())
    rig.run()
    answer = rig.answers[request_id]
    assert answer.finish is FinishReason.LENGTH
    assert answer.text.startswith("{")


def test_a_bias_acts_within_the_grammar() -> None:
    rig = Rig()
    tokens = prompt(random.Random(3), 20)
    biased = greedy(8, logit_bias={ord("b"): 100.0, ord("z"): 100.0})
    banned = greedy(8, logit_bias={ord("b"): -100.0})
    ids = [rig.submit(tokens, params, grammar=regex("[ab]{8}")) for params in (biased, banned)]
    rig.run()
    assert [rig.answers[each].text for each in ids] == ["b" * 8, "a" * 8]


class Broken:
    """A grammar that fails at its third token, as one beyond the library's limits does."""

    def start(self) -> Guide:
        return _BrokenGuide()


class _BrokenGuide:
    ended = False

    def __init__(self) -> None:
        self.error: str | None = None
        self._tokens = 0

    def allowed(self) -> bytes:
        return b"\xff" * 33

    def advance(self, _token: int) -> None:
        self._tokens += 1
        if self._tokens == 3:
            self.error = "the grammar cannot be followed: too complex"


def test_a_grammar_that_fails_ends_its_own_answer_only() -> None:
    rng = random.Random(4)
    rig = Rig()
    good = rig.submit(prompt(rng, 20), greedy(30, ignore_eos=True))
    bad = rig.submit(prompt(rng, 20), greedy(30, ignore_eos=True), grammar=Broken())
    rig.run()
    assert rig.answers[bad].finish is FinishReason.GRAMMAR
    assert rig.answers[bad].last.error == "the grammar cannot be followed: too complex"
    assert len(rig.answers[bad].tokens) == 2
    assert len(rig.answers[good].tokens) == 30
    rig.check_idle()


def test_an_abort_in_the_middle() -> None:
    rig = Rig()
    request_id = rig.submit(prompt(random.Random(3), 20), greedy(300), grammar=thing())
    rig.step(4)
    rig.loop.abort(request_id)
    rig.run()
    assert rig.answers[request_id].finish is FinishReason.ABORT
    rig.check_idle()
