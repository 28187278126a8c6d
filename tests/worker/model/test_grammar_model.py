"""Random tiny models under a grammar: answers follow their schema, whoever is beside them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import pytest
import torch
from torch import Tensor

from shared.bytetok import byte_bundle
from shared.errors import ApiError
from shared.paging import BlockPool
from worker.detokenise import Detokenizer
from worker.generation import Delta, GenerationRequest
from worker.grammar import GrammarCompiler
from worker.guide import Grammar, GrammarSpec
from worker.model.sampler import Sampler
from worker.runner import Chunk
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams
from worker.steploop import StepLoop

pytest.importorskip("llguidance")
pytestmark = pytest.mark.torch
END = 257
SIZE = 8


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A nested object."""

    kind: Literal["bolt", "nut", "gear"]
    sizes: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=999)]], msgspec.Meta(max_length=3)]


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What the answers must be."""

    customer: Annotated[str, msgspec.Meta(max_length=8)]
    urgent: bool
    part: Part
    spare: Part | None


COMPILER = GrammarCompiler(byte_bundle().tokenizer_json, 259, (END,))
SCHEMA = msgspec.json.encode(msgspec.json.schema(Order)).decode()


def order() -> Grammar:
    return COMPILER.compile(GrammarSpec("json", SCHEMA, "response_format"))


def regex(source: str) -> Grammar:
    return COMPILER.compile(GrammarSpec("regex", source, "guided_regex"))


class Answers:
    """A step loop over a model, and what left it."""

    def __init__(self, driver: Any, *, blocks: int = 150) -> None:
        self.scheduler = Scheduler(
            BlockPool(blocks, SIZE),
            max_batch_tokens=64,
            max_running=16,
            max_waiting=1000,
            max_model_len=driver.runner.max_model_len,
            eos_token_ids=driver.runner.eos_token_ids,
        )
        self.deltas: dict[str, list[Delta]] = {}
        self.loop: StepLoop[str] = StepLoop(
            driver.runner,
            self.scheduler,
            lambda tokens: Detokenizer(_decode, tokens),
            lambda: 0.0,
            lambda _: None,
            self._collect,
        )

    def _collect(self, outgoing: list[tuple[str, Delta | ApiError]]) -> None:
        for name, item in outgoing:
            assert isinstance(item, Delta)
            self.deltas.setdefault(name, []).append(item)

    def ask(
        self, name: str, tokens: Sequence[int], params: SamplingParams, grammar: Grammar | None
    ) -> None:
        made = GenerationRequest(name, tuple(tokens), params, bytes(16), grammar=grammar)
        self.loop.accept(made, name)

    def run(self) -> dict[str, tuple[str, str]]:
        """Text and finish reason of every answer."""
        while self.loop.step():
            self.scheduler.check()
        return {
            name: ("".join(delta.text for delta in deltas), str(deltas[-1].finish))
            for name, deltas in self.deltas.items()
        }


def _decode(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def jobs(count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Random prompts, each with its own way of sampling."""
    rng = random.Random(5)
    made = {}
    for each in range(count):
        params = SamplingParams(
            max_tokens=400,
            temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            seed=each,
            repetition_penalty=rng.choice([1.0, 1.3]),
            min_tokens=rng.choice([0, 20]),
            logit_bias=rng.choice([{}, {ord("}"): -50.0, ord("x"): 50.0}]),
        )
        made[str(each)] = (rng.choices(range(256), k=rng.randrange(1, 60)), params)
    return made


@pytest.fixture(scope="module")
def model(driver: Callable[..., Any]) -> Any:
    sizes = {"vocab_size": 280, "eos_token_id": END}
    return driver("llama", block_size=SIZE, n_blocks=160, num_hidden_layers=1, **sizes)


def test_a_hundred_random_prompts_follow_the_schema(model: Any) -> None:
    answers = Answers(model)
    for name, (tokens, params) in jobs(100).items():
        answers.ask(name, tokens, params, order())
    results = answers.run()
    assert len(results) == 100
    for text, finish in results.values():
        assert finish == "stop"
        msgspec.json.decode(text, type=Order)
    assert len({text for text, _ in results.values()}) > 80


def test_neighbours_and_preemption_change_nothing(model: Any) -> None:
    wanted = jobs(8)
    alone = {}
    for name, (tokens, params) in wanted.items():
        single = Answers(model)
        single.ask(name, tokens, params, order())
        alone |= single.run()
    rng = random.Random(9)
    crowd = Answers(model, blocks=45)
    for name, (tokens, params) in wanted.items():
        crowd.ask(name, tokens, params, order())
        free = SamplingParams(max_tokens=50, temperature=1.0, ignore_eos=True)
        crowd.ask(f"free {name}", rng.choices(range(256), k=30), free, None)
        crowd.ask(f"other {name}", rng.choices(range(256), k=30), free, regex("[ab]*"))
    results = crowd.run()
    assert crowd.scheduler.counters.preemptions > 0
    assert {name: results[name] for name in wanted} == alone
    for name in wanted:
        assert len(crowd.deltas[f"free {name}"]) == 50
        assert set(results[f"other {name}"][0]) == {"a", "b"}


def test_a_row_without_a_grammar_is_left_alone(model: Any) -> None:
    tokens = list(b"the same prompt")
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
    single, mixed = Answers(model), Answers(model)
    single.ask("x", tokens, params, None)
    mixed.ask("x", tokens, params, None)
    mixed.ask("y", tokens, params, order())
    assert single.run()["x"] == mixed.run()["x"]


# --- the sampler alone -------------------------------------------------------------------------


def chunk(name: str, params: SamplingParams, source: str | None, output_len: int = 0) -> Chunk:
    guide = None if source is None else regex(source).start()
    return Chunk(name, 0, (1,), (0,), True, params, output_len=output_len, guide=guide)


def logits(size: int, **values: float) -> Tensor:
    row = torch.zeros(size)
    for text, value in values.items():
        row[ord(text)] = value
    return row


@pytest.mark.parametrize("size", [258, 259, 264, 320])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_the_mask_holds_is_ever_chosen(size: int, temperature: float) -> None:
    sampler = Sampler(frozenset({END}), random.Random(1))
    params = SamplingParams(temperature=temperature, top_k=3, min_p=0.01, logprobs=2)
    rows = torch.stack([logits(size, z=50.0, a=1.0), logits(size, z=50.0), logits(size, z=9.0)])
    if size == 320:
        rows[:, 300:] = 100.0  # padding that is no token
    for _ in range(20):
        chunks = [chunk("g", params, "[a-c]"), chunk("f", params, None), chunk("h", params, "q")]
        chosen = sampler.sample(rows.clone()[: len(chunks)], chunks)
        tokens, logprobs = chosen.tokens, chosen.logprobs
        assert chr(tokens["g"]) in "abc"
        assert tokens["h"] == ord("q")
        if size < 320:
            assert logprobs["f"].top[0][0] == ord("z")
    # log-probabilities stay those of the model itself
    expected = rows[2].log_softmax(-1)[ord("q")]
    assert logprobs["h"].logprob == pytest.approx(float(expected))


def test_ends_wait_for_min_tokens_unless_the_grammar_leaves_nothing_else() -> None:
    sampler = Sampler(frozenset({END}), random.Random(1))
    row = torch.zeros(1, 259)
    row[0, END] = 50.0
    least = SamplingParams(temperature=0.0, min_tokens=4)
    for params, source, expected in (
        (SamplingParams(temperature=0.0), "a*", END),
        (least, "a*", ord("a")),
        (least, "", END),
        (SamplingParams(temperature=0.0, ignore_eos=True), "a*", ord("a")),
        (SamplingParams(temperature=0.0, ignore_eos=True), "", END),
        (SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(97,)), "a", 97),
        (SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(97,)), "a|b", 98),
    ):
        tokens = sampler.sample(row, [chunk("x", params, source)]).tokens
        assert tokens["x"] == expected, (params, source)
