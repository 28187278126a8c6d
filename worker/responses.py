"""OpenAI's response shapes, streamed and whole, from the engine's deltas. P: no I/O.

Answer   gathers one choice's deltas
Shape    turns deltas into stream chunks, and finished answers into one body
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.errors import ApiError, BadRequest, DeadlineExceeded, InternalError, NoCapacity
from worker.generation import LATE, Delta
from worker.logprobshape import Entry, Json, LogprobForm, Offsets
from worker.sequence import FinishReason, TokenLogprob
from worker.tokentext import TokenText


def failure(delta: Delta) -> ApiError | None:
    """The error a last delta stands for, if it ended in anything but an answer."""
    if delta.finish is FinishReason.ERROR:
        return InternalError(delta.error or "The engine failed while it generated this answer.")
    if delta.finish is FinishReason.GRAMMAR:  # the client's own: no other worker follows it either
        return BadRequest(delta.error or "The grammar cannot be followed.")
    if delta.finish is FinishReason.DEADLINE:
        return DeadlineExceeded(LATE)
    if delta.finish is FinishReason.ABORT:
        return NoCapacity("The server is stopping and could not finish this answer.")
    return None


@dataclass(eq=False, slots=True)
class Answer:
    """One choice so far."""

    prompt: int
    """Index of its prompt within the request."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        """Take in the next delta."""
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.entries.extend(zip(delta.token_ids, delta.logprobs, strict=True))
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.count(delta)

    def count(self, delta: Delta) -> None:
        """Take in only the counts and the end."""
        self.finish = delta.finish
        self.prompt_tokens = delta.prompt_tokens
        self.output_tokens = delta.output_tokens
        self.cached_tokens = delta.cached_tokens


def usage_of(answers: Sequence[Answer]) -> Json:
    """The usage object: each prompt counts once, however many choices it got.

    Cached is what the least lucky choice of a prompt found: its siblings found, at least in part,
    what this very request had computed.
    """
    prompts: dict[int, tuple[int, int]] = {}
    for answer in answers:
        cached = answer.cached_tokens
        if answer.prompt in prompts:
            cached = min(cached, prompts[answer.prompt][1])
        prompts[answer.prompt] = (answer.prompt_tokens, cached)
    prompt_tokens = sum(tokens for tokens, _ in prompts.values())
    completion_tokens = sum(answer.output_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts.values())},
    }


class Shape(Protocol):
    """One request's way to speak."""

    def opening(self, index: int, delta: Delta) -> list[Json]:
        """Chunks before those of a choice's first delta."""
        ...

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Chunks for one delta; none if it shows nothing."""
        ...

    def closing(self, answers: Sequence[Answer]) -> list[Json]:
        """Chunks after the last delta of the last choice."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The body of a request that does not stream."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response repeats."""

    id: str
    created: int
    model: str
    include_usage: bool

    def chunk(self, kind: str, choices: list[Json]) -> Json:
        """A stream chunk; ``usage`` is null on all but the last one, if it is wanted at all."""
        chunk: Json = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunks(self, kind: str, answers: Sequence[Answer]) -> list[Json]:
        """The one chunk with usage, if wanted."""
        if not self.include_usage:
            return []
        return [{**self.chunk(kind, []), "usage": usage_of(answers)}]

    def body(self, kind: str, choices: list[Json], answers: Sequence[Answer]) -> Json:
        """A whole response."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_of(answers),
        }


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows of its request."""

    prompts: Sequence[Sequence[int]] = ()
    """Token ids of each prompt."""
    n: int = 1
    """Choices of each prompt."""
    echoes: Sequence[str] = ()
    """Text of each prompt, if it is repeated in front of the answer."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token, if they are shown in vLLM's form."""
    token_ids: bool = False
    """Ids of prompt and answer beside the text."""
    as_ids: bool = False
    """Log-probabilities name tokens by their ids."""

    def prompt(self, index: int) -> Sequence[int]:
        """The prompt of a choice."""
        return self.prompts[index // self.n]


JUST_THE_ANSWER = Shown()


class CompletionShape:
    """``/v1/completions``. Choices are ordered prompt by prompt, ``n`` for each."""

    _KIND = "text_completion"

    def __init__(self, head: Head, tokens: TokenText, shown: Shown = JUST_THE_ANSWER) -> None:
        self._head, self._tokens, self._shown = head, tokens, shown
        self._form = LogprobForm(tokens, as_ids=shown.as_ids)
        self._offsets: dict[int, Offsets] = {}

    def opening(self, index: int, delta: Delta) -> list[Json]:
        """The prompt, if it is echoed."""
        if not self._shown.echoes and not self._shown.token_ids:
            return []
        logprobs = None
        if delta.prompt_logprobs is not None:
            logprobs = self._logprobs(index, [], delta.prompt_logprobs)
        chunk = self._chunk(index, self._echo(index), logprobs, None)
        if self._shown.token_ids:
            ids = {"prompt_token_ids": list(self._shown.prompt(index)), "token_ids": []}
            chunk["choices"][0].update(ids)
        return [chunk]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Text and finish reason together."""
        shown = delta.text or delta.logprobs or (self._shown.token_ids and delta.token_ids)
        if not shown and delta.finish is None:
            return []
        logprobs = None
        if delta.logprobs is not None:
            entries = list(zip(delta.token_ids, delta.logprobs, strict=True))
            logprobs = self._logprobs(index, entries)
        chunk = self._chunk(index, delta.text, logprobs, delta.finish)
        if self._shown.token_ids:
            chunk["choices"][0]["token_ids"] = list(delta.token_ids)
        return [chunk]

    def closing(self, answers: Sequence[Answer]) -> list[Json]:
        """Usage, if wanted."""
        return self._head.usage_chunks(self._KIND, answers)

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The ``text_completion`` object."""
        choices = [self._choice(index, answers) for index in range(len(answers))]
        return self._head.body(self._KIND, choices, answers)

    def _choice(self, index: int, answers: Sequence[Answer]) -> Json:
        answer = answers[index]
        # the prompt is the same for all choices, and only the first one looked at it
        scores = answers[index - index % self._shown.n].prompt_logprobs
        choice: Json = {
            "index": index,
            "text": self._echo(index) + "".join(answer.texts),
            "logprobs": None,
            "finish_reason": answer.finish,
        }
        if answer.entries:
            echoed = scores if self._shown.echoes else None
            choice["logprobs"] = self._logprobs(index, answer.entries, echoed)
        if self._shown.token_ids:
            choice["prompt_token_ids"] = list(self._shown.prompt(index))
            choice["token_ids"] = answer.token_ids
        if self._shown.prompt_logprobs is not None and scores is not None:
            prompt = self._shown.prompt(index)
            choice["prompt_logprobs"] = self._form.prompt(
                prompt, scores, self._shown.prompt_logprobs
            )
        return choice

    def _echo(self, index: int) -> str:
        return self._shown.echoes[index // self._shown.n] if self._shown.echoes else ""

    def _chunk(
        self, index: int, text: str, logprobs: Json | None, finish: FinishReason | None
    ) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._head.chunk(self._KIND, [choice])

    def _logprobs(
        self,
        index: int,
        entries: Sequence[Entry],
        echoed: Sequence[TokenLogprob] | None = None,
    ) -> Json:
        """Of the echoed prompt, if its log-probabilities are given, then of ``entries``."""
        offsets = self._offsets.setdefault(index, Offsets(self._tokens, self._echo(index)))
        shown: list[Entry] = []
        starts: list[int] = []
        if echoed is not None:
            prompt = self._shown.prompt(index)
            shown += zip(prompt, [None, *echoed], strict=True)
            starts += offsets.in_prompt(prompt)
        starts += [offsets.next(token) for token, _ in entries]
        return self._form.completion([*shown, *entries], starts)
