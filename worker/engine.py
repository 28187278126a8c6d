"""The engine as asyncio code sees it: one thread that owns runner and scheduler, and an inbox.

Rules: only the engine thread touches :class:`StepLoop`'s state, only the event loop touches
streams; one ``call_soon_threadsafe`` per step carries all of its deltas. Closing an answer's
iterator aborts it between two steps, and its blocks are free then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec
import structlog

from shared.errors import ApiError, BadRequest, DeadlineExceeded, InternalError, NoCapacity
from shared.events import CacheEvent
from shared.load import WorkerLoad
from worker.detokenise import Detokenizer
from worker.generation import LATE, Delta, EngineStats, GenerationRequest, StepRecord
from worker.runner import Runner
from worker.scheduler import Scheduler
from worker.sequence import FinishReason
from worker.steploop import StepLoop

__all__ = ["Delta", "Engine", "EngineStats", "GenerationRequest", "StepRecord"]

T = TypeVar("T")

Stream = asyncio.Queue[Delta | ApiError]

STALL_S = 15.0
"""A step that takes longer than this, and than :data:`STALL_FACTOR` times the longest one that has
ended lately, makes the engine unhealthy: seen from outside within 20 s."""

STALL_FACTOR = 3.0
"""A slow machine with a huge token budget has steps of many seconds; they are no stall."""

JOIN_S = 30.0
"""So long ``stop`` waits for a step that runs."""

MAX_FAILED_STEPS = 3
"""So many failed steps in a row make the engine unhealthy: the device is probably lost."""

log = structlog.get_logger(__name__)


class Engine:
    """Generates answers. Started inside a running event loop, which must outlive it.

    :param detokenizer_factory: called with the prompt's tokens, on the engine thread.
    :param clock: monotonic seconds.
    :param on_events: gets the cache events of each step, on the engine thread, before the step's
        deltas are delivered; must not block.
    :param on_step: gets a record of each step, on the engine thread; must not block.
    :param stall_s: how long a step may take on a machine that is not known to be slower.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        detokenizer_factory: Callable[[tuple[int, ...]], Detokenizer],
        clock: Callable[[], float],
        on_events: Callable[[list[CacheEvent]], None],
        on_step: Callable[[StepRecord], None] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._steps: StepLoop[Stream] = StepLoop(
            runner, scheduler, detokenizer_factory, clock, on_events, self._deliver, on_step
        )
        self._scheduler = scheduler
        self._vocab_size = runner.vocab_size
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at = clock()
        self._open: set[str] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._submitted = 0
        self._draining = False
        self._halting = False
        """Set by the engine thread on its way out; it answers nothing that is asked later."""
        self._crashed = False

    def start(self) -> None:
        """Start the thread. Call once, on the event loop that will consume answers."""
        self._loop = asyncio.get_running_loop()
        self._started_at = self._clock()
        self._thread.start()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._draining = True

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for ``drain_s``, abort the rest, stop."""
        self._draining = True
        if not self._thread.is_alive():
            return
        try:
            async with asyncio.timeout(drain_s):
                await self._quiet.wait()
        except TimeoutError:
            log.warning("engine_drain_timeout", unfinished=len(self._open))
        self._inbox.put(self._halt)
        await asyncio.to_thread(self._thread.join, JOIN_S)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Yield deltas until one has ``finish``. Closing the iterator early aborts the request.

        All errors but the last are raised before the first delta.

        :raises BadRequest: empty prompt or token ids outside the vocabulary.
        :raises ContextLengthExceeded: the prompt can never fit.
        :raises NoCapacity: the queue is full, or the worker is shutting down.
        :raises DeadlineExceeded: at any point, even while a step takes for ever.
        """
        self.require_servable(request.prompt_tokens)
        stream: Stream = asyncio.Queue()
        self._open.add(request.id)
        self._quiet.clear()
        self._submitted += 1
        ended = False
        alarm = self._alarm(request, stream)
        try:
            self._inbox.put(lambda: self._accept(request, stream))
            self._require_alive()
            while not ended:
                item = await stream.get()
                if isinstance(item, ApiError):
                    ended = True
                    raise item
                ended = item.finish is not None
                yield item
        finally:
            if alarm is not None:
                alarm.cancel()
            self._open.discard(request.id)
            if not self._open:
                self._quiet.set()
            if not ended:
                self.abort(request.id)

    def _alarm(self, request: GenerationRequest, stream: Stream) -> asyncio.TimerHandle | None:
        """Ends the stream at the deadline; the engine ends the request between two steps."""
        if request.deadline is None:
            return None
        left_s = max(0.0, request.deadline - self._clock())
        late = DeadlineExceeded(LATE)
        return asyncio.get_running_loop().call_later(left_s, stream.put_nowait, late)

    def require_servable(self, prompt_tokens: Sequence[int]) -> None:
        """Raise what :meth:`generate` would raise for this prompt; for several prompts at once."""
        if self._draining:
            raise NoCapacity("this worker is shutting down", retry_after_s=1.0)
        self._require_alive()
        if not prompt_tokens:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if min(prompt_tokens) < 0 or max(prompt_tokens) >= self._vocab_size:
            raise BadRequest("the prompt has token ids outside the vocabulary", param="prompt")
        self._scheduler.require_fit(len(prompt_tokens))

    def abort(self, request_id: str) -> None:
        """End a request between two steps; its stream ends with ``ABORT``. Unknown ids are fine."""
        self._inbox.put(lambda: self._steps.abort(request_id))

    def load(self) -> WorkerLoad:
        """The latest snapshot, plus what still lies in the inbox, without what the step that runs
        has done of its tokens by now: a step may take seconds. Thread-safe."""
        snapshot, started = self._steps.load, self._steps.step_started
        done = 0.0
        if started is not None:
            done = max(0.0, self._clock() - started) * snapshot.prefill_tokens_per_s
        done = min(done, self._steps.step_tokens)
        return msgspec.structs.replace(
            snapshot,
            waiting=snapshot.waiting + max(0, self._submitted - self._steps.accepted),
            queued_prefill_tokens=max(0, snapshot.queued_prefill_tokens - int(done)),
            draining=self._draining,
            uptime_s=self._clock() - self._started_at,
        )

    def stats(self) -> EngineStats:
        """The latest totals. Thread-safe."""
        return self._steps.stats

    @property
    def alive(self) -> bool:
        """Whether the thread lives; a dead one never serves again."""
        return self._thread.is_alive() and not self._crashed

    def healthy(self, now: float) -> bool:
        """Whether the thread lives, is not stuck in a step, and its steps do not all fail."""
        started = self._steps.step_started
        return (
            self._thread.is_alive()
            and not self._crashed
            and self._steps.failed_steps < MAX_FAILED_STEPS
            and (started is None or now - started < self._patience())
        )

    def _patience(self) -> float:
        """Seconds that a step may take."""
        return max(self._stall_s, STALL_FACTOR * self._steps.longest_s)

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine thread between two steps and return what it returns."""
        self._require_alive()
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has left
            try:
                self._require_alive()
                self._steps.refresh_if_due()
                value = function()
            except Exception as error:  # noqa: BLE001 - handed to the caller, not swallowed
                future.set_exception(error)
            else:
                future.set_result(value)

        self._inbox.put(answer)
        self._require_alive()
        return await asyncio.wrap_future(future)

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the engine thread between two steps, after what was posted before.

        Not at all once the engine has ended.
        """
        self._inbox.put(function)

    async def flush_cache(self) -> None:
        """Forget all cached blocks; running requests keep theirs, which nobody matches any more."""
        await self.call(self._scheduler.pool.clear)

    async def snapshot(self) -> tuple[int, list[int], list[int]]:
        """How many event batches ``on_events`` has been given, and the keys as of that batch: on
        the device, and in host memory."""

        def read() -> tuple[int, list[int], list[int]]:
            self._steps.publish()
            pool = self._scheduler.pool
            return self._steps.event_batches, pool.snapshot_keys(), pool.host.journal.keys()

        return await self.call(read)

    def _require_alive(self) -> None:
        if self._halting or not self._thread.is_alive():
            raise InternalError("the engine is not running")

    # ---- on the engine thread ----

    def _main(self) -> None:
        try:
            worked = True
            while not self._halting:
                self._obey_inbox(wait=not worked)
                worked = not self._halting and self._steps.step()
        except BaseException:
            self._crashed = True
            log.exception("engine_crashed")
        finally:
            self._halting = True
            self._wind_up()

    def _obey_inbox(self, *, wait: bool) -> None:
        """Do what was asked meanwhile. With nothing to compute, sleep until something is asked."""
        command = self._inbox.get() if wait else self._next_command()
        while command is not None:
            command()
            command = self._next_command()
        self._steps.publish()

    def _next_command(self) -> Callable[[], None] | None:
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _accept(self, request: GenerationRequest, stream: Stream) -> None:
        if self._halting:
            self._steps.refuse(stream)
        else:
            self._steps.accept(request, stream)

    def _halt(self) -> None:
        self._halting = True

    def _wind_up(self) -> None:
        """Leave nobody waiting: end every answer, answer every question still in the inbox."""
        self._steps.end_all(FinishReason.ERROR if self._crashed else FinishReason.ABORT)
        self._obey_inbox(wait=False)
        self._steps.runner.close()

    def _deliver(self, outgoing: list[tuple[Stream, Delta | ApiError]]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_hand_over, outgoing)


def _hand_over(outgoing: list[tuple[Stream, Delta | ApiError]]) -> None:
    for stream, item in outgoing:
        stream.put_nowait(item)
