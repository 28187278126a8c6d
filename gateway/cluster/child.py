"""One supervised child process: started, watched, restarted when it dies, stopped with its tree.

On Linux a child asks the kernel to be killed when its parent dies, so that not even ``kill -9`` of
``headwater up`` leaves an orphan behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
EXIT_CONFIG = 2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
MAX_FAILED_STARTS = 3
"""A child that never became ready is not restarted more often than this."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. ``ready`` is awaited after each start and returns once the child serves."""

    name: str
    argv: tuple[str, ...]
    log: Path | None
    """Where its output goes; None: its stderr is ours."""
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], Awaitable[None]] | None = None
    """None: the child says so itself by a line on stdout that begins with ``ready``."""
    stop_s: Callable[[], float] = lambda: 10.0
    """After SIGTERM, how long until SIGKILL."""
    heard: Callable[[str], bool] | None = None
    """Takes each line of stdout instead; True: with this one it is ready."""
    inherits: tuple[int, ...] = ()
    """File descriptors it gets."""
    gives_up: bool = True
    """One that was ready once is given up if it cannot come up again."""


class ChildFailed(Exception):
    """A child cannot be brought up; ``code`` is what the whole command should exit with."""

    def __init__(self, name: str, code: int, detail: str) -> None:
        super().__init__(f"{name} failed (exit code {code}): {detail}")
        self.code = EXIT_CONFIG if code == EXIT_CONFIG else 1


def _die_with_parent() -> None:
    """Runs in the child between fork and exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """Keeps one :class:`ChildSpec` running until :meth:`stop`."""

    def __init__(self, spec: ChildSpec, say: Callable[[str], None]) -> None:
        self.spec = spec
        self.is_ready = asyncio.Event()
        self.deaths = 0
        """Times that it ended without being asked to."""
        self._say = say
        self._stop_asked = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def stopping(self) -> bool:
        """A stop was asked for; no restart follows."""
        return self._stop_asked

    async def run(self) -> None:
        """Run and restart until stopped; raises :class:`ChildFailed` if it cannot come up."""
        failed_starts, pause, was_ever_ready = 0, FIRST_PAUSE_S, False
        while not self.stopping:
            code = await self._run_once()
            if self._stop_asked:
                return
            was_ready = self.is_ready.is_set()
            was_ever_ready = was_ever_ready or was_ready
            self.is_ready.clear()
            self.deaths += 1
            failed_starts, pause = (
                (0, FIRST_PAUSE_S) if was_ready else (failed_starts + 1, pause * 2)
            )
            hopeless = code == EXIT_CONFIG or failed_starts >= MAX_FAILED_STARTS
            if hopeless and (self.spec.gives_up or not was_ever_ready):
                raise ChildFailed(self.spec.name, code, self._last_words())
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            where = f"; log: {self.spec.log}" if self.spec.log is not None else ""
            self._say(f"{self.spec.name}: died ({cause}), restarting{where}")
            await asyncio.sleep(min(pause, LONGEST_PAUSE_S))

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after ``stop_s``; returns when it is gone."""
        self._stop_asked = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.spec.stop_s())
        except TimeoutError:
            self.kill()
            await process.wait()

    def signal(self, number: int) -> None:
        """Send one, if it runs."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL now."""
        self._stop_asked = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _run_once(self) -> int:
        path = self.spec.log
        with contextlib.nullcontext() if path is None else path.open("ab") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.spec.env},
                pass_fds=self.spec.inherits,
                # Ctrl-C reaches the whole foreground group: a session of its own keeps the order of
                # stopping (gateways, workers, Redis) in our hands
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            if self.stopping:  # stop() came while the process was being made
                process.kill()
            probe = asyncio.create_task(self._await_ready())
            try:
                await self._read_output(process, log)
                return await process.wait()
            finally:
                probe.cancel()

    async def _await_ready(self) -> None:
        if self.spec.ready is not None:
            await self.spec.ready()
            self.is_ready.set()

    async def _read_output(
        self, process: asyncio.subprocess.Process, log: IO[bytes] | None
    ) -> None:
        """Follow stdout: the ready line, and progress for the user (a download, a conversion)."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if log is not None:
                log.write(line)
                log.flush()
            text = line.decode(errors="replace").rstrip()
            if self.spec.heard is not None:
                if self.spec.heard(text):
                    self.is_ready.set()
            elif self.spec.ready is None and text.startswith("ready "):
                self.is_ready.set()
            elif text and self.spec.ready is None:
                self._say(f"{self.spec.name}: {text}")

    def _last_words(self) -> str:
        """The last line it wrote, for the one-line error."""
        if self.spec.log is None:
            return "it said why"
        try:
            lines = self.spec.log.read_text(errors="replace").strip().splitlines()
        except OSError as error:
            return str(error)
        return lines[-1] if lines else "it wrote nothing"
