"""Continuous batching: who computes what in the next step. No I/O, no torch, no clock.

A step is planned as 1. decodes, 2. running prefills, 3. admission, under a token budget and, beside
decodes, a time budget. Rules:

- Who runs and who has to make way, :mod:`worker.roster` decides.
- A block is sealed in :meth:`Scheduler.commit`, after its KV has been computed, never before.
- Between ``plan`` and ``commit`` nothing is allocated, so blocks of a sequence that is aborted
  meanwhile cannot be given to another while the runner still writes them.
"""

from __future__ import annotations

from heapq import merge

from shared.errors import ContextLengthExceeded, NoCapacity
from shared.load import WorkerLoad
from shared.paging import BlockPool
from shared.types import Tier
from worker.deadlines import Deadlines
from worker.hostpace import HostPace
from worker.outcome import Counters, TokenOut
from worker.pace import Allowance, Pace
from worker.roster import Roster, rank_of
from worker.runner import Chunk, StepPlan, StepResult
from worker.sequence import FinishReason, Phase, Sequence
from worker.siblings import Siblings
from worker.verdict import verdict


class Scheduler:
    """Owns the pool and all sequences. Mutable state: everything in ``__init__`` below ``pool``."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        max_waiting: int,
        max_step_ms: float = 0.0,
    ) -> None:
        self.pool = pool
        self.max_len = min(max_model_len, pool.n_blocks * pool.block_size)
        """Longest sequence, prompt and answer together."""
        self._budget = max_batch_tokens
        self._max_waiting = max_waiting
        self._eos = eos_token_ids
        self._pace = Pace(max_step_ms / 1000)
        self._host_pace = HostPace()
        self._dropped = 0
        self._deadlines = Deadlines()
        self._step = 0
        self.counters = Counters()
        self.roster = Roster(pool, max_running, self.counters)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.roster.known

    def require_fit(self, prompt_len: int) -> None:
        """Raise :class:`ContextLengthExceeded` if no token fits behind a prompt. Thread-safe."""
        if prompt_len + 1 > self.max_len:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_len} tokens; this worker takes at most "
                f"{self.max_len - 1} and one token of answer"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        :raises ContextLengthExceeded: it can never fit.
        :raises NoCapacity: too many wait already.
        """
        if seq.id in self.roster.known:
            raise ValueError(f"sequence {seq.id} is already here")
        self.require_fit(len(seq.tokens))
        if len(self.roster.waiting) >= self._max_waiting:
            raise NoCapacity("too many requests wait for this worker", retry_after_s=1.0)
        self.roster.enqueue(seq)
        self._deadlines.add(seq)

    def abort(self, seq_id: str) -> Sequence | None:
        """End a sequence at once and free its blocks; None if it is not here (any more)."""
        return self.finish(seq_id, FinishReason.ABORT)

    def finish(self, seq_id: str, reason: FinishReason) -> Sequence | None:
        """End a sequence for a reason found outside, e.g. a stop string; None if not here."""
        seq = self.roster.remove(seq_id)
        if seq is None:
            return None
        self._deadlines.discard(seq)
        seq.phase, seq.finish, seq.held_by = Phase.FINISHED, reason, None
        return seq

    def expire(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline has passed, wherever they are, and free their blocks.

        :param now: monotonic seconds.
        """
        late = [self.finish(each, FinishReason.DEADLINE) for each in self._deadlines.due(now)]
        self.counters.deadlines += len(late)
        return [seq for seq in late if seq is not None]

    def plan(self) -> StepPlan | None:
        """Chunks of the next step; None if nothing can be computed, which means nothing is here."""
        self._step += 1
        self.pool.host.switch(self.host_pays())
        chunks: list[Chunk] = []
        self.roster.make_way()
        preempted = -1
        while not chunks and self.counters.preemptions != preempted:
            # More than once only if all whose turn it was had to make way: then others can go on.
            preempted = self.counters.preemptions
            self._plan_all(chunks)
        return StepPlan(tuple(chunks), self.pool.host.drain_copies()) if chunks else None

    def host_pays(self) -> bool:
        """Whether blocks should move to host memory and back in the step that begins."""
        pace = self._pace.prefill_tokens_per_s
        return self._host_pace.pays(self.pool.block_size / pace if pace else 0.0)

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenOut]:
        """Apply a step: seal what is full, append tokens, end what is complete."""
        self._pace.observe(plan, result.seconds - result.copy_seconds)
        self._count_copies(plan, result.copy_seconds)
        outs: list[TokenOut] = []
        for chunk in plan.chunks:
            seq = self.roster.running.get(chunk.seq_id)
            if seq is None:
                continue  # aborted while the step ran
            if seq.id in result.failed:
                outs.append(self._spoilt(seq, result.failed[seq.id]))
                continue
            seq.computed += len(chunk.tokens)
            if chunk.targets:
                seq.scores += result.prompt_logprobs[seq.id]
            self.roster.blocks.seal(seq)
            self._count(seq, chunk)
            if chunk.sample:
                outs.append(self._append(seq, result))
        return outs

    def fail(self, plan: StepPlan) -> list[TokenOut]:
        """End the sequences of a step that was lost; what it wrote was never sealed.

        What its copies wrote was: then all that is cached is forgotten, and who was admitted to
        blocks that were to be loaded, without a chunk in the plan, starts again.
        """
        chunks = plan.chunks
        ended = [self.finish(chunk.seq_id, FinishReason.ERROR) for chunk in chunks]
        if plan.copies:
            self.pool.clear()
            unsure = {copy.dst for copy in plan.copies if copy.source is Tier.HOST}
            for seq in list(self.roster.running.values()):
                if not unsure.isdisjoint(seq.blocks):
                    self.roster.preempt(seq)
        lost = "the step that computed this answer failed"
        return [TokenOut(seq, None, finish=seq.finish, error=lost) for seq in ended if seq]

    def load(self) -> WorkerLoad:
        """Counts and measured rates. O(sequences)."""
        return WorkerLoad(
            running=len(self.roster.running),
            waiting=len(self.roster.waiting),
            queued_prefill_tokens=sum(len(seq.tokens) - seq.reusable for seq in self.roster.waiting)
            + sum(len(seq.tokens) - seq.computed for seq in self.roster.prefills()),
            blocks_total=self.pool.n_blocks,
            blocks_used=self.pool.n_used,
            blocks_cached=self.pool.n_cached,
            prefill_tokens_per_s=self._pace.prefill_tokens_per_s,
            decode_tokens_per_s=self._pace.decode_tokens_per_s,
            host_blocks_total=self.pool.host.n_slots,
            host_blocks_used=self.pool.host.n_used,
            host_tokens_per_s=self._host_pace.blocks_per_s * self.pool.block_size,
        )

    # ---- planning ----

    def _plan_all(self, chunks: list[Chunk]) -> None:
        self._plan_decodes(self._decode_share(), chunks)
        prefills = sorted(self.roster.prefills(), key=_turn)
        if prefills or self.roster.waiting:
            allowance = self._pace.allowance(self._budget - len(chunks), chunks)
            self._plan_prefills(prefills, allowance, chunks)
        if len(chunks) < len(self.roster.running):
            # What a reserve for prefills did not use goes to decodes after all.
            self._plan_decodes(self._budget - sum(len(chunk.tokens) for chunk in chunks), chunks)

    def _decode_share(self) -> int:
        """Decodes that may enter before prefills. With more decodes than budget, prefills get a
        quarter of it, or every second step when it is a single token: neither starves."""
        if len(self.roster.running) < self._budget:
            return self._budget
        if not self.roster.waiting and not any(True for _ in self.roster.prefills()):
            return self._budget
        if self._budget == 1:
            return self._step % 2
        return self._budget - max(1, self._budget // 4)

    def _plan_decodes(self, limit: int, chunks: list[Chunk]) -> None:
        """Add up to ``limit`` decodes, those that waited longest. Once the plan holds chunks of
        prefills nobody is preempted, as that could hit one of them."""
        ready = [
            seq
            for seq in self.roster.running.values()
            if seq.last_step != self._step and not seq.prefilling
        ]
        if len(ready) > limit:
            ready.sort(key=lambda seq: (seq.last_step, seq.rank))
            del ready[max(0, limit) :]
        preempt = not chunks
        for seq in sorted(ready, key=rank_of):
            if seq.phase is Phase.RUNNING and self.roster.make_room(seq, preempt=preempt):
                self._plan_chunk(seq, 1, chunks)

    def _plan_chunk(self, seq: Sequence, n_tokens: int, chunks: list[Chunk]) -> None:
        start, end = seq.computed, seq.computed + n_tokens
        seq.last_step = self._step
        chunks.append(
            Chunk(
                seq_id=seq.id,
                start=start,
                tokens=tuple(seq.tokens[start:end]),
                blocks=self.roster.blocks.table(seq, end),
                sample=end == len(seq.tokens),
                params=seq.params,
                context=tuple(seq.tokens) if seq.params.penalised else (),
                prompt_len=seq.prompt_len,
                output_len=seq.output_len,
                adapter=seq.adapter,
                guide=seq.guide,
                targets=tuple(seq.tokens[start + 1 : end + 1]) if seq.scoring else (),
            )
        )

    # ---- prefills and admission ----

    def _plan_prefills(
        self, prefills: list[Sequence], allowance: Allowance, chunks: list[Chunk]
    ) -> None:
        """Continue running ``prefills`` and start waiting sequences, the most urgent first.

        One that waits for a sibling lets others pass; one that finds no space does not, or a big
        prompt would starve.
        """
        siblings = Siblings(
            self.roster.blocks, self.roster.running.values() if self.roster.waiting else ()
        )
        admitting = True
        for seq in merge(prefills, self.roster.waiting, key=_turn):
            if allowance.tokens < 1:
                break
            if seq.phase is Phase.WAITING:
                if not admitting or self.roster.held_back(seq, siblings):
                    continue
                admitting = self.roster.start(seq)
                if not admitting:
                    continue
                siblings.add(seq)
            n_tokens = allowance.take(seq.computed, len(seq.tokens) - seq.computed)
            if n_tokens > 0:
                self._plan_chunk(seq, n_tokens, chunks)
        self.roster.tidy()

    # ---- committing ----

    def _count_copies(self, plan: StepPlan, seconds: float) -> None:
        if not plan.copies and self.pool.host.n_dropped == self._dropped:
            return
        out = sum(copy.source is Tier.GPU for copy in plan.copies)
        loaded, dropped = len(plan.copies) - out, self.pool.host.n_dropped
        self.counters.blocks_moved_out += out
        self.counters.blocks_moved_in += loaded
        self._host_pace.observe(out + loaded, seconds, loaded, dropped - self._dropped)
        self._dropped = dropped

    def _count(self, seq: Sequence, chunk: Chunk) -> None:
        if chunk.sample:
            self.counters.decode_tokens += 1
        if chunk.decode:
            return
        if seq.preemptions:
            self.counters.recomputed_tokens += len(chunk.tokens)
        else:
            self.counters.computed_tokens += len(chunk.tokens)

    def _spoilt(self, seq: Sequence, why: str) -> TokenOut:
        """End a sequence that the model can do nothing with."""
        self.roster.blocks.distrust(seq)
        self.finish(seq.id, FinishReason.ERROR)
        return TokenOut(seq, None, finish=FinishReason.ERROR, error=why)

    def _append(self, seq: Sequence, result: StepResult) -> TokenOut:
        token = result.tokens[seq.id]
        seq.proven = seq.computed
        if seq.guide is not None:
            seq.guide.advance(token)
            if seq.guide.error is not None:
                self.finish(seq.id, FinishReason.GRAMMAR)
                return TokenOut(seq, None, finish=FinishReason.GRAMMAR, error=seq.guide.error)
        seq.tokens.append(token)
        finish, stop_token = verdict(seq, self._eos, self.max_len)
        if finish is not None:
            self.finish(seq.id, finish)
        return TokenOut(seq, token, result.logprobs.get(seq.id), finish, stop_token)

    def check(self) -> None:
        """Prove the invariants between two steps; raises AssertionError. O(pool + sequences)."""
        self.roster.check()
        timed = sum(seq.deadline is not None for seq in self.roster.known.values())
        if len(self._deadlines) != timed:
            raise AssertionError("a deadline is lost")


def _turn(seq: Sequence) -> tuple[int, int]:
    return seq.urgency, seq.order
