"""How long something took on a machine that has other work as well.

A limit on time is meant for an idle machine. Beside other tests on two cores, part of what a clock
shows is time in which a process was ready to run and got no CPU. The kernel counts that for each
process (``/proc/PID/schedstat``) and for the whole machine (``steal`` in ``/proc/stat``), so it can
be left out. Time in which the code computed, slept or waited for an answer is not: a fault that
takes time is seen as before, and without such counts (not Linux) nothing is left out.

:class:`Stopwatch` measures; :class:`Limit` says when waiting for something has lasted too long.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Runs from its making. Leaves out what this process and those it started waited for a CPU."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._waited = look()
        self._stolen_s = _stolen_s()

    def seconds(self) -> float:
        """Since the start; never more than a clock would show."""
        took = time.monotonic() - self._begun
        look()
        # A process that was not there at the start has waited since then only.
        waited = sum(
            total - self._waited.get(pid, 0.0)
            for pid, (total, seen) in _known.items()
            if seen >= self._begun
        )
        return max(0.0, took - waited - (_stolen_s() - self._stolen_s))


_PATIENCE = 10.0
"""However busy the machine is, nothing is waited for so many times as long as it may take."""


class Limit:
    """Whether it has lasted longer than ``within_s`` by a :class:`Stopwatch`. Runs from its making.

    The waits of several processes at once add up there, so that on a busy machine no time might
    seem to pass at all: after ten times as long by the clock it is over in any case.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s, self._begun, self._watch = within_s, time.monotonic(), Stopwatch()

    def over(self) -> bool:
        """Asked often, it costs nothing before the time has passed by the clock."""
        took = time.monotonic() - self._begun
        if took < self._within_s:
            return False
        return took >= _PATIENCE * self._within_s or self._watch.seconds() >= self._within_s


def waited_s(pid: int) -> float:
    """Seconds that a process has waited for a CPU since it began; 0 where nobody counts them."""
    try:
        return int((_PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


_known: dict[int, tuple[float, float]] = {}
"""What each process had waited, and when that was seen."""


def look() -> dict[int, float]:
    """See what processes have waited so far: what is not seen of one that ends is not left out."""
    waited, now = _waited(), time.monotonic()
    _known.update({pid: (total, now) for pid, total in waited.items()})
    return waited


def _waited() -> dict[int, float]:
    """Seconds that each process waited for a CPU: this one and its descendants."""
    found: dict[int, float] = {}
    left = [os.getpid()]
    while left:
        pid = left.pop()
        try:
            found[pid] = 0.0
            for task in (_PROC / str(pid) / "task").iterdir():
                # One thread may have to wait for another that waits.
                found[pid] += int((task / "schedstat").read_text().split()[1]) / 1e9
                left += map(int, (task / "children").read_text().split())
        except (OSError, IndexError, ValueError):  # it has ended, or the kernel does not count
            continue
    return found


def _stolen_s() -> float:
    """Seconds that the host kept from one CPU of this machine, on average."""
    try:
        fields = (_PROC / "stat").read_text().splitlines()[0].split()
        return int(fields[8]) / _TICKS / (os.cpu_count() or 1)
    except (OSError, IndexError, ValueError):
        return 0.0
