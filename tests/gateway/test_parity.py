"""Proof of equal tokens: the comparison, and the prober against engines right and wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from tokenstub import OTHER_TEMPLATE, TokenStub, bos_bundle, renderer_of, with_template

from gateway.config import WorkersConfig
from gateway.feeds.members import Members
from gateway.feeds.parity import ParityProber
from gateway.index.stats import FeedStats
from gateway.owntokens import bos_of, encode
from gateway.parity import PROBES, Answer, Finding, Kind, Parity, Probe, Verdict, judge
from gateway.parityforms import Ask, Reply, conversation
from shared.bundle import TokenizerBundle
from shared.bytetok import byte_bundle
from shared.load import WorkerInfo

FORMS = ("vllm", "sglang", "llamacpp", "tgi", "headwater")


class Own:
    """The gateway's side, with one tokenizer."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.renderer = renderer_of(bundle)
        self.why: str | None = None
        self.wait = False

    def missing(self, info: WorkerInfo) -> str | None:
        return self.why

    def loading(self, info: WorkerInfo) -> bool:
        return self.wait

    def bos(self, info: WorkerInfo) -> int | None:
        return bos_of(self.renderer)

    async def encode(self, info: WorkerInfo, probe: Probe) -> Answer:
        return encode(self.renderer, probe)


class Notes:
    """Stands in for the router."""

    def __init__(self) -> None:
        self.parity: list[Parity] = []

    def note_parity(self, worker: str, parity: Parity, now: float) -> None:
        self.parity.append(parity)


Start = Callable[..., Awaitable[TokenStub]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    stubs: list[TokenStub] = []

    async def one(**settings: Any) -> TokenStub:
        stubs.append(await TokenStub.start(**settings))
        return stubs[-1]

    yield one
    for stub in stubs:
        await stub.stop()


@pytest.fixture
async def prober() -> AsyncIterator[Callable[..., ParityProber]]:
    async with aiohttp.ClientSession() as session:
        made: list[ParityProber] = []

        def make(
            own: Own, router: Notes | None = None, clock: Callable[[], float] = lambda: 0.0
        ) -> ParityProber:
            stats = FeedStats()
            config = WorkersConfig(health_timeout_s=10.0)
            one = ParityProber(router or Notes(), own, session, config, stats, clock)  # type: ignore[arg-type]
            made.append(one)
            return one

        yield make
        for one in made:
            await one.close()


@pytest.mark.parametrize("form", FORMS)
async def test_an_engine_with_the_same_files_is_equal(form: str, start: Start, prober: Any) -> None:
    stub = await start(form=form)
    parity = await prober(Own(byte_bundle())).prove(stub.info)
    assert parity == Parity(Verdict.EQUAL, "", "", len(PROBES))


async def test_an_engine_of_unknown_make_is_asked_in_both_usual_forms(
    start: Start, prober: Any
) -> None:
    stub = await start(form="llamacpp")
    info = WorkerInfo(**{**_fields(stub.info), "engine": "openai"})
    assert (await prober(Own(byte_bundle())).prove(info)).verdict is Verdict.EQUAL


def _fields(info: WorkerInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


@pytest.mark.parametrize("form", ["vllm", "sglang", "headwater"])
async def test_a_doubled_bos_is_named(form: str, start: Start, prober: Any) -> None:
    """The template writes the BOS, and the engine adds another."""
    ours = with_template(bos_bundle(), "{{ bos_token }}" + OTHER_TEMPLATE)
    stub = await start(form=form, bundle=ours, twist=lambda tokens: [256, *tokens])
    parity = await prober(Own(ours)).prove(stub.info)
    assert parity.verdict is Verdict.DIFFERENT
    assert "a second BOS" in parity.reason
    assert "4 of 6" in parity.reason
    assert "add_special_tokens" in parity.fix


async def test_a_missing_bos_is_named(start: Start, prober: Any) -> None:
    ours = with_template(bos_bundle(), "{{ bos_token }}" + OTHER_TEMPLATE)
    stub = await start(bundle=ours, twist=lambda tokens: tokens[1:])
    parity = await prober(Own(ours)).prove(stub.info)
    assert parity.verdict is Verdict.DIFFERENT
    assert "leaves the BOS out" in parity.reason


@pytest.mark.parametrize("form", FORMS)
async def test_another_template_is_named(form: str, start: Start, prober: Any) -> None:
    stub = await start(form=form, bundle=with_template(byte_bundle(), OTHER_TEMPLATE))
    parity = await prober(Own(byte_bundle())).prove(stub.info)
    assert parity.verdict is Verdict.DIFFERENT
    assert "another template" in parity.reason
    assert "--chat-template" in parity.fix


@pytest.mark.parametrize("form", FORMS)
async def test_a_missing_template_is_named_with_the_engines_words(
    form: str, start: Start, prober: Any
) -> None:
    stub = await start(form=form, bundle=with_template(byte_bundle(), None))
    parity = await prober(Own(byte_bundle())).prove(stub.info)
    assert parity.verdict is Verdict.DIFFERENT
    assert "no chat template" in parity.reason


async def test_a_model_without_a_template_on_both_sides_is_equal(start: Start, prober: Any) -> None:
    bare = with_template(byte_bundle(), None)
    stub = await start(bundle=bare)
    assert (await prober(Own(bare)).prove(stub.info)).verdict is Verdict.EQUAL


@pytest.mark.parametrize("form", FORMS)
async def test_without_a_route_it_is_unproven_and_says_so(
    form: str, start: Start, prober: Any
) -> None:
    stub = await start(form=form, routes=False)
    parity = await prober(Own(byte_bundle())).prove(stub.info)
    assert parity.verdict is Verdict.UNPROVEN
    assert "route" in parity.reason


async def test_where_chats_are_not_tokenised_their_length_is_compared(
    start: Start, prober: Any
) -> None:
    same = await start(form="sglang", chats=False)
    parity = await prober(Own(byte_bundle())).prove(same.info)
    assert (parity.verdict, parity.compared) == (Verdict.EQUAL, len(PROBES) - 1)
    other = await start(form="sglang", chats=False, twist=lambda tokens: [*tokens, 10])
    parity = await prober(Own(byte_bundle())).prove(other.info)
    assert parity.verdict is Verdict.DIFFERENT
    assert "counts" in parity.reason


async def test_a_dead_worker_is_unproven_not_different(prober: Any) -> None:
    info = WorkerInfo("x", 1, "http://127.0.0.1:9", ("m",), engine="vllm")
    assert (await prober(Own(byte_bundle())).prove(info)).verdict is Verdict.UNPROVEN


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (Reply(401), "api_key"),
        (Reply(404), "route"),
        (Reply(503, b"busy"), "503"),
        (Reply(200, b"<html>"), "read"),
        (Reply(200, b'{"tokens": ["a"]}'), "read"),
        (Reply(0, reason="no answer in time"), "in time"),
    ],
)
@pytest.mark.parametrize("form", ["vllm", "llamacpp", "tgi"])
def test_any_odd_answer_is_missing_with_its_reason(form: str, reply: Reply, word: str) -> None:
    talk = conversation(form, "m", PROBES[2])
    next(talk)
    with pytest.raises(StopIteration) as end:
        talk.send(reply)
    answer: Answer = end.value.value
    assert answer.tokens is None
    assert word in answer.missing


def test_the_probe_prompts_are_short_and_of_every_kind() -> None:
    assert {probe.name for probe in PROBES} >= {"plain", "unicode", "system", "multi-turn", "tools"}
    renderer = renderer_of(byte_bundle())
    sizes = [len(encode(renderer, probe).tokens or ()) for probe in PROBES]
    assert sum(sizes) < 2_000  # bytes: an upper bound for every tokenizer


def test_a_proof_of_plain_prompts_alone_is_none() -> None:
    texts = [p for p in PROBES if p.kind is Kind.TEXT]
    chats = [p for p in PROBES if p.kind is Kind.CHAT]
    same = [Finding(p, Answer([1, 2]), Answer([1, 2])) for p in texts]
    silent = [Finding(p, Answer([1]), Answer(missing="no route")) for p in chats]
    parity = judge([*same, *silent], None)
    assert parity.verdict is Verdict.UNPROVEN
    assert "no route" in parity.reason


def test_an_engine_that_needs_a_flag_for_tools_is_told_which() -> None:
    findings = [Finding(p, Answer([1]), Answer([1])) for p in PROBES[:-1]]
    words = "tools param requires --jinja flag"
    findings.append(Finding(PROBES[-1], Answer([1]), Answer(refused=words)))
    parity = judge(findings, None)
    assert parity.verdict is Verdict.DIFFERENT
    assert "--jinja" in parity.fix


async def _settle(prober: ParityProber, members: Members, notes: Notes, count: int) -> None:
    async with asyncio.timeout(20.0):
        while len(notes.parity) < count:
            prober.tick(members)
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    prober.tick(members)


async def test_it_is_proved_once_and_again_after_each_change(start: Start, prober: Any) -> None:
    from gateway.discovery.base import Source

    stub, notes, now = await start(), Notes(), [0.0]
    members = Members()
    member = members.add(stub.url, Source.STATIC)
    members.adopt(member, stub.info)
    member.healthy = True
    one = prober(Own(byte_bundle()), notes, lambda: now[0])
    await _settle(one, members, notes, 1)
    now[0] += 1e6
    one.tick(members)
    await asyncio.sleep(0.05)
    assert len(notes.parity) == 1
    assert len(stub.asked) == len(PROBES)
    changes: tuple[dict[str, Any], ...] = ({"epoch": 2}, {"tokenizer": "other"}, {"models": ("n",)})
    for count, change in enumerate(changes, 2):
        members.adopt(member, WorkerInfo(**{**_fields(stub.info), **change}))
        await _settle(one, members, notes, count)


async def test_a_difference_and_a_silence_are_asked_again_with_growing_pauses(
    start: Start, prober: Any
) -> None:
    from gateway.discovery.base import Source

    stub, notes, now = await start(twist=lambda tokens: [7, *tokens]), Notes(), [0.0]
    members = Members()
    member = members.add(stub.url, Source.STATIC)
    members.adopt(member, stub.info)
    member.healthy = True
    one = prober(Own(byte_bundle()), notes, lambda: now[0])
    await _settle(one, members, notes, 1)
    now[0] += 6.0
    await _settle(one, members, notes, 2)
    now[0] += 6.0  # the pause has doubled
    one.tick(members)
    await asyncio.sleep(0.05)
    assert [p.verdict for p in notes.parity] == [Verdict.DIFFERENT] * 2
    stub.twist = list
    now[0] += 6.0
    await _settle(one, members, notes, 3)
    assert notes.parity[-1].verdict is Verdict.EQUAL


async def test_nothing_is_asked_before_the_own_tokenizer_is_there(
    start: Start, prober: Any
) -> None:
    from gateway.discovery.base import Source

    stub, notes, own = await start(), Notes(), Own(byte_bundle())
    own.wait = True
    members = Members()
    member = members.add(stub.url, Source.STATIC)
    members.adopt(member, stub.info)
    member.healthy = True
    one = prober(own, notes)
    one.tick(members)
    await asyncio.sleep(0.05)
    assert not stub.asked
    own.wait, own.why = False, "the worker names no tokenizer"
    await _settle(one, members, notes, 1)
    assert notes.parity[0].verdict is Verdict.UNPROVEN
    assert notes.parity[0].reason == "the worker names no tokenizer"
    assert not stub.asked


async def test_asking_that_begins_to_load_the_own_tokenizer_is_no_verdict(
    start: Start, prober: Any
) -> None:
    from gateway.discovery.base import Source

    class Lazy(Own):
        """Nobody has asked for its tokenizer yet."""

        def missing(self, info: WorkerInfo) -> str | None:
            if self.why is None:
                self.wait, self.why = True, "the tokenizer is being loaded"
            return self.why if self.wait else None

    stub, notes, own = await start(), Notes(), Lazy(byte_bundle())
    members = Members()
    member = members.add(stub.url, Source.STATIC)
    members.adopt(member, stub.info)
    member.healthy = True
    one = prober(own, notes)
    for _ in range(3):
        one.tick(members)
        await asyncio.sleep(0.05)
    assert own.wait
    assert not notes.parity
    own.wait = False
    await _settle(one, members, notes, 1)
    assert notes.parity[0].verdict is Verdict.EQUAL


def test_the_asks_have_each_engines_form() -> None:
    text, chat = PROBES[0], PROBES[2]
    assert next(conversation("vllm", "m", text)) == Ask("/tokenize", {"model": "m", **text.fields})
    assert next(conversation("llamacpp", "m", text)).body["content"] == text.fields["prompt"]
    assert next(conversation("llamacpp", "m", chat)).path == "/apply-template"
    assert next(conversation("tgi", "m", chat)).path == "/chat_tokenize"
