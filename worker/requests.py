"""What a generation request asks of this engine: sampling, limits, and what it refuses.

Three kinds of fields: supported (range-checked here), without effect on the answer (accepted), and
known ones that would change the answer but are not supported (refused by name). What no OpenAI or
vLLM document defines is ignored; the server logs such names once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shared.errors import BadRequest, ContextLengthExceeded
from shared.openai import GenerateRequest, RouteKind, prompts_of
from worker.defaults import OPENAI, SamplingDefaults
from worker.fields import Fields, wrong
from worker.guide import GrammarSpec
from worker.sequence import SamplingParams
from worker.structured import FIELDS, read_form
from worker.toolask import ToolAsk, read_tools

MAX_CHOICES = 128
MAX_SEQUENCES = 2048
"""Prompts times ``n`` of one request."""
MAX_STOPS = 64
MAX_LOGPROBS = 20
SEED_LIMIT = 2**63
COMPLETION_DEFAULT = 16
"""``max_tokens`` of /v1/completions when absent, as OpenAI defines it."""

SUPPORTED = frozenset(
    "model messages prompt stream stream_options temperature top_p top_k min_p seed n stop "
    "stop_token_ids presence_penalty frequency_penalty repetition_penalty logit_bias logprobs "
    "top_logprobs max_tokens max_completion_tokens min_tokens ignore_eos echo cache_salt tools "
    "tool_choice parallel_tool_calls add_generation_prompt continue_final_message "
    "chat_template_kwargs add_special_tokens priority prompt_logprobs "
    "include_stop_str_in_output skip_special_tokens allowed_token_ids bad_words return_token_ids "
    "return_tokens_as_token_ids".split()
).union(FIELDS)
WITHOUT_EFFECT = frozenset(
    "store metadata user service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prediction request_id".split()
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Known fields that are not supported, with the values that ask for nothing.
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_grammar": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can do."""

    vocab_size: int
    max_tokens: int
    """Longest prompt + answer that the model and the KV pool can hold."""
    defaults: SamplingDefaults = OPENAI
    """For fields that a request leaves out."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request, but for the lengths of its prompts."""

    kind: RouteKind
    params: SamplingParams
    """``max_tokens`` in it is not final: see :func:`with_room`."""
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    prompt_logprobs: int | None
    """vLLM's field; ``params`` has it too, or what an echo needs if that is more."""
    salt: str
    priority: int
    bad_words: tuple[str, ...]
    """Texts; ``params`` gets their tokens."""
    specials: bool
    """Special tokens are part of the text."""
    token_ids: bool
    as_ids: bool
    unknown: tuple[str, ...]
    form: GrammarSpec | None = None
    """What the answers must be, unless they are tool calls."""
    tools: ToolAsk | None = None


def read_ask(request: GenerateRequest, limits: Limits) -> Ask:
    """Check every field but the prompt's length. Raises ``BadRequest`` that names the field."""
    fields = Fields(request.fields)
    chat = request.kind is RouteKind.CHAT
    _refuse_unsupported(fields, chat=chat)
    max_tokens = _max_tokens(fields)
    params = _params(fields, limits, chat=chat, max_tokens=max_tokens)
    echo = not chat and fields.flag("echo")
    prompt_logprobs = _prompt_logprobs(fields, stream=request.stream)
    asked = [prompt_logprobs, params.logprobs if echo else None]
    scores = max((n for n in asked if n is not None), default=None)
    params = replace(params, prompt_logprobs=scores)
    if fields.get("cache_salt") == "":
        raise BadRequest("'cache_salt' must not be empty.", param="cache_salt")
    form = read_form(fields)
    for name in ("allowed_token_ids", "bad_words"):
        if form is not None and fields.get(name):
            raise BadRequest(f"'{name}' and a form of the answer exclude each other.", param=name)
    known = SUPPORTED | WITHOUT_EFFECT | NEUTRAL.keys()
    return Ask(
        kind=request.kind,
        params=params,
        max_tokens=max_tokens,
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=request.stream,
        include_usage=request.include_usage,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        salt=fields.text("cache_salt") or "",
        priority=fields.integer("priority", -(2**31), 2**31 - 1) or 0,
        bad_words=fields.texts("bad_words", MAX_STOPS),
        specials=not fields.flag("skip_special_tokens", default=True),
        token_ids=fields.flag("return_token_ids"),
        as_ids=fields.flag("return_tokens_as_token_ids"),
        unknown=tuple(name for name in fields.names() if name not in known),
        form=form,
        tools=read_tools(fields, chat=chat),
    )


def with_room(ask: Ask, prompt_tokens: int, limits: Limits) -> int:
    """How many tokens may be generated after this prompt.

    :raises ContextLengthExceeded: if the prompt, or the prompt and the answer asked for by name,
        are beyond the model's length or the whole KV pool.
    """
    room = limits.max_tokens - prompt_tokens
    asked = ask.max_tokens
    if room < max(asked or 1, ask.params.min_tokens):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.max_tokens} tokens. However, you "
            f"requested {prompt_tokens + (asked or 1)} tokens ({prompt_tokens} in the prompt, "
            f"{asked or 1} for the answer). Please reduce the length of either.",
            param="messages" if ask.kind is RouteKind.CHAT else "prompt",
        )
    if asked is not None:
        return asked
    return room if ask.kind is RouteKind.CHAT else min(COMPLETION_DEFAULT, room)


def check_sequences(call: GenerateRequest, n: int, max_waiting: int) -> None:
    """Raise if one request asks for more sequences than any client means to, or than may wait.

    :param max_waiting: all of them queue before the first one runs, so more never find room.
    """
    prompts = 1 if call.kind is RouteKind.CHAT else len(prompts_of(call))
    limit = min(MAX_SEQUENCES, max_waiting)
    if prompts * n > limit:
        raise BadRequest(
            f"{prompts} prompts times n={n} is beyond {limit} sequences.",
            param="n" if n > 1 else "prompt",
        )


def _max_tokens(fields: Fields) -> int | None:
    newer = fields.integer("max_completion_tokens", 1, 2**31 - 1)
    older = fields.integer("max_tokens", 1, 2**31 - 1)
    return newer if newer is not None else older


def _params(
    fields: Fields, limits: Limits, *, chat: bool, max_tokens: int | None
) -> SamplingParams:
    usual = limits.defaults
    top_p = fields.number("top_p", 0, 1, usual.top_p)
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    top_k = usual.top_k if top_k is None else max(top_k, 0)
    min_tokens = fields.integer("min_tokens", 0, 2**31 - 1) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest("'min_tokens' must not be above 'max_tokens'.", param="min_tokens")
    repetition = fields.number("repetition_penalty", 0, 100, usual.repetition_penalty)
    if repetition == 0:
        raise wrong("repetition_penalty", 0, "above 0")
    return SamplingParams(
        max_tokens=max_tokens or COMPLETION_DEFAULT,
        temperature=fields.number("temperature", 0, 2, usual.temperature),
        # An empty nucleus still holds its best token.
        top_p=top_p or 1.0,
        top_k=top_k if top_p else 1,
        min_p=fields.number("min_p", 0, 1, usual.min_p),
        seed=fields.integer("seed", -SEED_LIMIT, SEED_LIMIT - 1),
        stop=fields.texts("stop", MAX_STOPS),
        stop_token_ids=fields.token_ids("stop_token_ids", limits.vocab_size),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        repetition_penalty=repetition,
        logit_bias=fields.biases("logit_bias", limits.vocab_size),
        logprobs=_chat_logprobs(fields) if chat else _completion_logprobs(fields),
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        include_stop=fields.flag("include_stop_str_in_output"),
        allowed_token_ids=_allowed(fields, limits),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise BadRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    return (top or 0) if wanted else None


def _completion_logprobs(fields: Fields) -> int | None:
    if fields.get("top_logprobs") is not None:
        raise BadRequest(
            "'top_logprobs' belongs to chat completions; here 'logprobs' is the number.",
            param="top_logprobs",
        )
    if fields.get("logprobs") is False:
        return None
    return fields.integer("logprobs", 0, MAX_LOGPROBS)


def _allowed(fields: Fields, limits: Limits) -> tuple[int, ...]:
    if fields.get("allowed_token_ids") == []:
        raise BadRequest("'allowed_token_ids' must not be empty.", param="allowed_token_ids")
    return tuple(dict.fromkeys(fields.token_ids("allowed_token_ids", limits.vocab_size)))


def _prompt_logprobs(fields: Fields, *, stream: bool) -> int | None:
    wanted = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if wanted is not None and stream:
        raise BadRequest("'prompt_logprobs' are not streamed.", param="prompt_logprobs")
    return wanted


def _refuse_unsupported(fields: Fields, *, chat: bool) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"'{name}' is not supported by this server.", param=name)
    if chat and fields.flag("echo"):
        raise BadRequest("'echo' belongs to /v1/completions.", param="echo")
