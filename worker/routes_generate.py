"""``/v1/chat/completions`` and ``/v1/completions``: checked, encoded, generated, streamed.

    admit -> parse -> read_ask -> encode -> check lengths -> generate -> answer whole | stream

The head of a stream is held until the first delta, so whatever fails before it gets a proper
status. A client that leaves cancels the handler, which closes the engine's iterators: that aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog
from aiohttp import web

from shared.aside import aside
from shared.bulk import LARGE_BODY
from shared.deadline import timeout_s
from shared.errors import ApiError, InternalError
from shared.openai import GenerateRequest, RouteKind, error_body, parse, prompts_of
from shared.render import Renderer
from shared.sharedprefix import HEADER, SharedPrefix
from shared.sse import encode
from worker.chatshape import CallReading, ChatShape
from worker.engine import Engine
from worker.fanout import merge
from worker.generation import Delta, GenerationRequest
from worker.logprobshape import Json
from worker.requests import Ask, check_sequences, read_ask, with_room
from worker.responses import Answer, CompletionShape, Head, Shape, Shown, failure
from worker.routes_meta import encode_request
from worker.service import Loaded, Service
from worker.web import json_response, new_id, read_body

DONE = encode(b"[DONE]")
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A request that the engine has been found able to serve."""

    ask: Ask
    shape: Shape
    sequences: tuple[GenerationRequest, ...]

    def answers(self) -> list[Answer]:
        """One empty answer for each sequence."""
        return [Answer(prompt=index // self.ask.n) for index in range(len(self.sequences))]


class GenerateRoutes:
    """The two generation routes."""

    def __init__(self, service: Service, body_limit: int) -> None:
        self._service = service
        self._limit = body_limit

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Chat completions."""
        return await self._serve(request, RouteKind.CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Text completions."""
        return await self._serve(request, RouteKind.COMPLETIONS)

    async def _serve(self, request: web.Request, kind: RouteKind) -> web.StreamResponse:
        self._service.serving()
        deadline = self._deadline(request)
        body = await read_body(request, self._limit)
        call = await aside(len(body) > LARGE_BODY, parse, kind, body)
        loaded, model = self._service.loaded(), self._service.model_name(call.model)
        adapter = self._service.adapter(model)
        # From here to its end the request counts as the adapter's: it may be unloaded meanwhile.
        with loaded.adapters.using(adapter):
            scope = "" if adapter is None else adapter.info.scope
            shared = SharedPrefix.read(request.headers.get(HEADER))
            job = await self._job(call, model, scope, deadline, shared)
            # Reading and encoding take time: the engine may have begun to drain meanwhile.
            engine = self._service.serving().engine
            for sequence in job.sequences[:: job.ask.n]:
                engine.require_servable(sequence.prompt_tokens)
            if job.ask.stream:
                return await _stream(request, engine, job)
            return await _whole(engine, job)

    def _deadline(self, request: web.Request) -> float | None:
        """When the client stops waiting; reading and encoding count as well."""
        wanted = timeout_s(request.headers)
        return None if wanted is None else self._service.clock() + wanted

    async def _job(
        self,
        call: GenerateRequest,
        model: str,
        adapter: str,
        deadline: float | None,
        shared: SharedPrefix | None,
    ) -> Job:
        """``adapter``: its scope; empty is the model itself."""
        loaded = self._service.loaded()
        ask = read_ask(call, loaded.limits)
        self._service.note_unknown(ask.unknown)
        check_sequences(call, ask.n, self._service.config.schedule.max_waiting)
        prompts = (await encode_request(loaded.renderer, call)).prompts
        chat = call.kind is RouteKind.CHAT
        response_id = ("chatcmpl-" if chat else "cmpl-") + new_id()
        head = Head(response_id, int(self._service.wall()), model, ask.include_usage)
        echoes = _echoes(call, loaded.renderer) if ask.echo else ()
        shown = Shown(
            prompts, ask.n, echoes, ask.prompt_logprobs, token_ids=ask.token_ids, as_ids=ask.as_ids
        )
        tokens = loaded.tokens.with_specials() if ask.specials else loaded.tokens
        shape: Shape
        if chat:
            shape = ChatShape(head, tokens, _reading(ask, loaded), shown)
        else:
            shape = CompletionShape(head, tokens, shown)
        params = replace(ask.params, bad_words=_runs(ask.bad_words, loaded.renderer))
        ask = replace(ask, params=params)
        sequences = self._sequences(response_id, ask, prompts, adapter, shared)
        if ask.specials:
            shows = loaded.tokens.specials
            sequences = tuple(replace(sequence, shown=shows) for sequence in sequences)
        sequences = tuple(replace(sequence, deadline=deadline) for sequence in sequences)
        return Job(ask, shape, await _in_form(ask, loaded, sequences))

    def _sequences(
        self,
        response_id: str,
        ask: Ask,
        prompts: Sequence[Sequence[int]],
        adapter: str,
        shared: SharedPrefix | None,
    ) -> tuple[GenerationRequest, ...]:
        limits = self._service.loaded().limits
        sequences: list[GenerationRequest] = []
        for prompt in prompts:
            root, salt = self._service.salted(prompt, ask.salt, adapter, shared)
            room = with_room(ask, len(prompt), limits)
            for choice in range(ask.n):
                params = replace(ask.params, max_tokens=room)
                if choice and not ask.stream:
                    # What is known of the first choice's prompt is known of them all.
                    params = replace(params, prompt_logprobs=None)
                if params.seed is not None and choice:
                    # Choices of one seeded request differ from each other, and repeat as a whole.
                    params = replace(params, seed=(params.seed + choice) & (2**63 - 1))
                sequence_id = f"{response_id}-{len(sequences)}"
                sequences.append(
                    GenerationRequest(
                        sequence_id,
                        prompt,
                        params,
                        root,
                        ask.priority,
                        adapter=adapter,
                        salt=salt,
                    )
                )
        return tuple(sequences)


def _reading(ask: Ask, loaded: Loaded) -> CallReading | None:
    return None if ask.tools is None else CallReading(loaded.speech.format, ask.tools.names)


async def _in_form(
    ask: Ask, loaded: Loaded, sequences: tuple[GenerationRequest, ...]
) -> tuple[GenerationRequest, ...]:
    """The sequences with their grammar, compiled in a thread, and the marks of tool calls."""
    form = ask.form
    if ask.tools is not None:
        form = loaded.speech.grammar(ask.tools, form)
        shown = loaded.speech.shown
        sequences = tuple(
            replace(sequence, shown={**sequence.shown, **shown}) for sequence in sequences
        )
    if form is None:
        return sequences
    grammar = await asyncio.to_thread(loaded.grammars.compile, form, ask.salt)
    return tuple(replace(sequence, grammar=grammar) for sequence in sequences)


def _runs(words: Sequence[str], renderer: Renderer) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word, at the beginning of a text and after a space."""
    written = [text for word in words for text in (word, " " + word.lstrip())]
    runs = (tuple(renderer.encode_text(text, add_special_tokens=False)) for text in written)
    return tuple(dict.fromkeys(run for run in runs if run))


def _echoes(call: GenerateRequest, renderer: Renderer) -> list[str]:
    """The prompts as text, as the client sent them or decoded."""
    return [
        prompt if isinstance(prompt, str) else renderer.decode(prompt)
        for prompt in prompts_of(call)
    ]


def _deltas(engine: Engine, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
    return merge([engine.generate(sequence) for sequence in job.sequences])


async def _whole(engine: Engine, job: Job) -> web.Response:
    answers = job.answers()
    async with aclosing(_deltas(engine, job)) as deltas:
        async for index, delta in deltas:
            if error := failure(delta):
                raise error
            answers[index].add(delta)
    return json_response(job.shape.whole(answers))


async def _stream(request: web.Request, engine: Engine, job: Job) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    async with aclosing(_deltas(engine, job)) as deltas:
        first = await anext(deltas)
        if error := failure(first[1]):
            raise error
        await response.prepare(request)
        try:
            await _write_all(response, job, first, deltas)
        except ApiError as error:
            await response.write(encode(error_body(error)))
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - the status has been sent: an event is all that is left
            structlog.get_logger("worker.generate").exception("stream_failed")
            await response.write(encode(error_body(InternalError("The server failed."))))
    await response.write_eof()
    return response


async def _write_all(
    response: web.StreamResponse,
    job: Job,
    first: tuple[int, Delta],
    rest: AsyncIterator[tuple[int, Delta]],
) -> None:
    """All events up to ``[DONE]``; raises the error that a delta stands for."""
    answers = job.answers()
    shape = job.shape
    opened: set[int] = set()

    def events(index: int, delta: Delta) -> bytes:
        if error := failure(delta):
            raise error
        answers[index].count(delta)
        chunks = []
        if index not in opened:
            opened.add(index)
            chunks = shape.opening(index, delta)
        return _encoded([*chunks, *shape.chunks(index, delta)])

    await response.write(events(*first))
    async for index, delta in rest:
        if data := events(index, delta):
            await response.write(data)
    await response.write(_encoded(shape.closing(answers)) + DONE)


def _encoded(chunks: Sequence[Json]) -> bytes:
    return b"".join(encode(_json(chunk)) for chunk in chunks)


def _json(chunk: dict[str, Any]) -> bytes:
    """Line ends of Unicode are escaped: some clients read a stream by lines of text."""
    data = msgspec.json.encode(chunk)
    if not data.isascii():
        for line_end, escape in _LINE_ENDS:
            data = data.replace(line_end, escape)
    return data
