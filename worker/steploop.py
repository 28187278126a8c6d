"""The engine's loop without its thread: every method here runs on the engine thread.

A step reads: plan -> run -> commit -> detokenise -> publish events -> deliver. Cache events of a
step are handed on before its deltas, so a client never sees the end of an answer whose blocks have
not been announced. Tests drive it directly, step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from shared.errors import ApiError, NoCapacity
from shared.events import CacheEvent
from shared.load import WorkerLoad
from worker.detokenise import AnswerText, Detokenizer, Piece
from worker.generation import Delta, EngineStats, GenerationRequest, StepRecord
from worker.outcome import TokenOut
from worker.runner import Runner, RunnerError, StepPlan
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, Sequence, TokenLogprob

REFRESH_S = 0.02
"""Load and stats are renewed this often while steps run, and when requests come or go."""

DECODING_REFRESH_S = 0.1
"""The same after steps of decodes alone, which change little."""

LATELY = 200
"""Steps."""
SHRINKS = 0.5 ** (1 / LATELY)

NOTHING = Piece("")

log = structlog.get_logger(__name__)

Target = TypeVar("Target")


@dataclass(frozen=True, eq=False, slots=True)
class _Answer(Generic[Target]):
    seq: Sequence
    text: AnswerText
    target: Target


class StepLoop(Generic[Target]):
    """Owns runner and scheduler. ``Target`` is whatever the caller wants its deltas tagged with.

    :param detokenizer_factory: called with the prompt's tokens.
    :param clock: monotonic seconds.
    :param on_events: gets the cache events of each step; must not block.
    :param deliver: gets all deltas of a step, after its events; must not block.
    :param on_step: gets a record of each step; must not block.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        detokenizer_factory: Callable[[tuple[int, ...]], Detokenizer],
        clock: Callable[[], float],
        on_events: Callable[[list[CacheEvent]], None],
        deliver: Callable[[list[tuple[Target, Delta | ApiError]]], None],
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._detokenizer_factory = detokenizer_factory
        self._clock = clock
        self._on_events = on_events
        self._send = deliver
        self._on_step = on_step
        self._answers: dict[str, _Answer[Target]] = {}
        self._outgoing: list[tuple[Target, Delta | ApiError]] = []
        self._refreshed_at = clock()
        self._stale = False
        """Requests came or went since the last refresh."""
        self._step_counts: dict[str, int] = {}
        self._step_seconds: dict[str, float] = {}
        self._batch_tokens = 0
        # Read by other threads; each is replaced as a whole, never changed in place.
        self.accepted = 0
        self.event_batches = 0
        self.failed_steps = 0
        self.step_started: float | None = None
        self.step_tokens = 0
        """Of the step that runs, or ran last."""
        self.longest_s = 0.0
        """Duration of the longest step lately; it halves in :data:`LATELY` steps."""
        self.load = WorkerLoad()
        self.stats = EngineStats()
        self.refresh()

    def accept(self, request: GenerationRequest, target: Target) -> None:
        """Queue a request; a refusal goes to ``target`` as an :class:`ApiError`."""
        self.accepted += 1
        self._stale = True
        now = self._clock()
        seq = Sequence(
            id=request.id,
            tokens=list(request.prompt_tokens),
            prompt_len=len(request.prompt_tokens),
            params=request.params,
            scope_root=request.scope_root,
            salt=request.salt,
            arrived=now,
            priority=request.priority,
            deadline=request.deadline,
            adapter=request.adapter,
            guide=None if request.grammar is None else request.grammar.start(),
        )
        try:
            self.scheduler.add(seq)
        except ApiError as error:
            self._outgoing.append((target, error))
            return
        detokenizer = self._detokenizer_factory(tuple(request.prompt_tokens))
        params = request.params
        text = AnswerText(
            detokenizer,
            params.stop,
            params.min_tokens,
            request.shown,
            include_stop=params.include_stop,
        )
        self._answers[request.id] = _Answer(seq, text, target)

    def abort(self, request_id: str) -> None:
        """End a request between two steps; its blocks are free when this returns."""
        if self.scheduler.abort(request_id) is not None:
            self._end(self._answers.pop(request_id), FinishReason.ABORT)

    def expire(self) -> None:
        """End the requests whose deadline has passed; their blocks are free when this returns."""
        for seq in self.scheduler.expire(self._clock()):
            self._end(self._answers.pop(seq.id), FinishReason.DEADLINE)

    def step(self) -> bool:
        """One forward pass; False if there was nothing to compute."""
        self.expire()
        self.scheduler.pool.lifetimes.tick(self._clock())
        plan = self.scheduler.plan()
        if plan is None:
            if not self.scheduler.idle:
                raise RuntimeError("requests wait, and nothing can be computed")
            self.publish()
            self.refresh()
            return False
        kind = plan.kind
        every = DECODING_REFRESH_S if kind == "decode" else REFRESH_S
        self.refresh_if_due(every)
        self.step_tokens = plan.n_tokens
        started = self.step_started = self._clock()
        for out in self._compute(plan, kind):
            self._extend(out)
        self.longest_s = max(self._clock() - started, self.longest_s * SHRINKS)
        self.step_started = None
        self.refresh_if_due(every)
        self.publish()
        return True

    def publish(self) -> None:
        """Hand on pending cache events, then pending deltas."""
        events = self.scheduler.pool.drain_events()
        if events:
            self.event_batches += 1
            self._on_events(events)
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._send(outgoing)

    def refresh_if_due(self, every_s: float = REFRESH_S) -> None:
        """Renew ``load`` and ``stats`` if requests came or went, or the last time is long ago."""
        if self._stale or self._clock() - self._refreshed_at >= every_s:
            self.refresh()

    def refresh(self) -> None:
        """Renew ``load`` and ``stats``."""
        self._refreshed_at = self._clock()
        self._stale = False
        self.load = self.scheduler.load()
        counters = self.scheduler.counters
        pool = self.scheduler.pool
        self.stats = EngineStats(
            steps=dict(self._step_counts),
            step_seconds=dict(self._step_seconds),
            batch_tokens=self._batch_tokens,
            running=self.load.running,
            waiting=self.load.waiting,
            blocks_used=pool.n_used,
            blocks_cached=pool.n_cached,
            blocks_free=pool.n_free,
            host_tokens=counters.host_tokens,
            host_blocks_used=pool.host.n_used,
            host_blocks_free=pool.host.n_slots - pool.host.n_used,
            host_blocks_moved_out=counters.blocks_moved_out,
            host_blocks_moved_in=counters.blocks_moved_in,
            host_blocks_dropped=pool.host.n_dropped,
            lifetimes=pool.lifetimes.read(),
            prefill_cached_tokens=counters.cached_tokens,
            prefill_computed_tokens=counters.computed_tokens,
            prefill_recomputed_tokens=counters.recomputed_tokens,
            decode_tokens=counters.decode_tokens,
            preemptions=counters.preemptions,
            deadlines=counters.deadlines,
            held_back=counters.held_back,
        )

    def end_all(self, finish: FinishReason) -> None:
        """End every request; used when the engine stops."""
        for request_id in list(self._answers):
            self.scheduler.abort(request_id)
            self._end(self._answers.pop(request_id), finish)
        self.publish()
        self.refresh()

    def _compute(self, plan: StepPlan, kind: str) -> list[TokenOut]:
        """Run and commit. A failed step ends its sequences; the engine goes on."""
        try:
            result = self.runner.run(plan)
        except RunnerError:
            log.exception("step_failed", tokens=plan.n_tokens, sequences=len(plan.chunks))
            self.failed_steps += 1
            return self.scheduler.fail(plan)
        self.failed_steps = 0
        self._count(StepRecord(kind, result.seconds, plan.n_tokens, len(plan.chunks)))
        return self.scheduler.commit(plan, result)

    def _count(self, record: StepRecord) -> None:
        kind, seconds = record.kind, record.seconds
        self._step_counts[kind] = self._step_counts.get(kind, 0) + 1
        self._step_seconds[kind] = self._step_seconds.get(kind, 0.0) + seconds
        self._batch_tokens = record.tokens
        if self._on_step is not None:
            self._on_step(record)

    def _extend(self, out: TokenOut) -> None:
        """Turn a committed token into a delta; a stop string ends the sequence here."""
        answer = self._answers[out.seq.id]
        finish = out.finish
        reason: int | str | None = out.stop_token
        piece = NOTHING
        if out.token is not None and (out.stop_token is None or out.seq.params.include_stop):
            piece = answer.text.push(out.token, out.seq.output_len)
        if piece.stop is None and finish is not None:
            piece = piece.followed_by(answer.text.finish())
        if piece.stop is not None:
            self.scheduler.finish(out.seq.id, FinishReason.STOP)
            finish, reason = FinishReason.STOP, piece.stop
        asked = out.seq.params.logprobs is not None and out.logprob is not None
        delta = Delta(
            text=piece.text,
            token_ids=() if out.token is None else (out.token,),
            logprobs=(out.logprob,) if asked and out.logprob is not None else None,
            finish=finish,
            cached_tokens=out.seq.cached or 0,
            prompt_tokens=out.seq.prompt_len,
            output_tokens=out.seq.output_len,
            stop_reason=reason,
            prompt_logprobs=_scores(out.seq),
            error=out.error,
        )
        self._outgoing.append((answer.target, delta))
        if finish is not None:
            self._stale = True
            del self._answers[out.seq.id]
            self.runner.forget(out.seq.id)

    def _end(self, answer: _Answer[Target], finish: FinishReason) -> None:
        """Last delta of an answer that ends without a new token."""
        self._stale = True
        self.runner.forget(answer.seq.id)
        delta = Delta(
            text=answer.text.finish().text,
            token_ids=(),
            logprobs=None,
            finish=finish,
            cached_tokens=answer.seq.cached or 0,
            prompt_tokens=answer.seq.prompt_len,
            output_tokens=answer.seq.output_len,
            error="the engine has stopped" if finish is FinishReason.ERROR else None,
        )
        self._outgoing.append((answer.target, delta))

    def refuse(self, target: Target) -> None:
        """Answer a request that came after the loop ended."""
        self._outgoing.append(
            (target, NoCapacity("this worker is shutting down", retry_after_s=1.0))
        )


def _scores(seq: Sequence) -> tuple[TokenLogprob, ...] | None:
    """Hands over the prompt's log-probabilities, once."""
    if seq.params.prompt_logprobs is None or seq.output_len != 1:
        return None
    scores, seq.scores = tuple(seq.scores), []
    return scores
