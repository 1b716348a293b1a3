# SPDX-License-Identifier: BSD-3-Clause
"""In the program of a rank: ``torchx_monarch.steps`` and ``time_left``, and the memory in which its host reads them.

All ranks are to end their loops at the same step, without a collective and without a system call in each step. A loop
has a stop point at its beginning and one after each step; a rank counts those that it has passed, in all its loops. To
stop, the controller chooses the number of a stop point as the target (``controller.agreed_stop``), and hosts write it
into the memory of their ranks (``host.ranks.step_memory``):

- At each stop point a rank reads the target. If it is another one, the rank writes that it has passed this one, and
  goes on. If it is this one, the rank writes that it waits, and reads the target again each millisecond, until the
  target has moved or is confirmed.
- The controller confirms a target once every rank waits at it, and chooses a later one once a rank has passed it.

No memory fence is needed. Without one, a rank may miss a target that was written before it read, and its host may not
see at once what it has passed. But it does in the end, and a rank that has passed the target does not wait at it, so
this target is never confirmed. A rank that waits leaves its stop point only when its host moves the target, which a
host never does once it is confirmed. Each field is an aligned word that one side alone writes, so no value is torn.

A rank must write that it has passed before it begins the next step: others may wait at the target for good while it
waits for them in a collective of that step.

A wait ends with the rank at the latest: the host ends ranks that are left after the grace period.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TypeVar, cast

T = TypeVar("T")

VARIABLE = "MONARCH_STEPS"
"""The variable with the file of this memory and the place of the rank in it: ``PATH:LOCAL_RANK``."""

FIELDS = 16
"""Words of 8 bytes of a rank."""

MAGIC, END, TARGET, CONFIRMED, PASSED, WAITS_AT, LOOPS, BEGUN, FIRST, SINCE, CHECKPOINT, SAVED, IGNORES = range(13)
"""The fields. The host writes the first four: ``KEY``, the known end or 0, the target, and the target that is confirmed
or 0. The rank writes how many stop points it has passed; the target at which it waits; how many loops and steps it has
begun; the number of its first step, plus 1, or ``UNNUMBERED``; when it began its first loop; the step of its last
checkpoint, plus 1, and when that was complete; 1 if it ignores SIGTERM. Times are milliseconds since the epoch; 0
stands for none."""

UNNUMBERED = -1
"""``FIRST`` where the steps have no numbers in a row: loops over other things than ranges, or over the same again."""

KEY = 0x7374657073

NEVER = 1 << 62
"""A stop point that no rank reaches."""

_POLL = 0.001


class Steps(Generic[T]):
    """The loop of ``steps``.

    Attributes:
        stopped: whether it has ended, or never begun, because the job is to stop.
    """

    def __init__(self, iterable: Iterable[T]) -> None:
        self.stopped = False
        self._iterable = iterable

    def __len__(self) -> int:
        return len(cast("Sized", self._iterable))

    def __iter__(self) -> Iterator[T]:
        memory = _memory()
        if memory is None:
            yield from self._iterable
            return
        memory[SINCE] = memory[SINCE] or int(time.time() * 1000)
        memory[IGNORES] = _ignores_sigterm()
        self.stopped = _stops(memory)
        if self.stopped:
            return
        memory[FIRST] = _first(self._iterable, memory)
        memory[LOOPS] += 1
        memory[PASSED] += 1
        for item in self._iterable:
            memory[BEGUN] += 1
            yield item
            passed = memory[PASSED]
            if memory[TARGET] == passed and _stops(memory):
                self.stopped = True
                return
            memory[PASSED] = passed + 1


def steps(iterable: Iterable[T]) -> Steps[T]:
    """Yield what ``iterable`` does, and end at the same step on all ranks when the job is to stop.

    That is before a time limit or a preemption, on ``torchx monarch cancel --save``, or after ``-cfg stop_after=2h``.
    Save after the loop, and let the program end: it has the grace period for that. Each rank must do the same steps. A
    loop that begins after that has no steps. Without our hosts, as under torchrun, the loop is that of ``iterable``.

    Args:
        iterable: such as ``range(start, n)``, whose numbers are shown as steps, or a data loader. No item is taken from
            it that is not used.

    Returns:
        An iterable, whose attribute ``stopped`` says whether it has ended early.
    """
    return Steps(iterable)


def time_left() -> float | None:
    """Return the seconds until the known end of the job: its time limit on Slurm, ``stop_after``, or after a notice.

    None if no end is known, or no host of ours runs this program; 0 once it has passed.
    """
    memory = _memory()
    return max(0.0, memory[END] / 1000 - time.time()) if memory is not None and memory[END] else None


def checkpointed(step: int) -> None:
    """Tell the host that the checkpoint of a step is complete."""
    if (memory := _memory()) is not None:
        memory[CHECKPOINT], memory[SAVED] = step + 1, int(time.time() * 1000)


def _first(iterable: object, memory: memoryview[int]) -> int:
    """Return ``FIRST`` for a loop that begins, which goes on where those before have ended, or is the first one."""
    if not isinstance(iterable, range) or iterable.step != 1 or not 0 <= iterable.start < 1 << 53:
        return UNNUMBERED
    first = memory[FIRST] if memory[LOOPS] else iterable.start + 1
    return first if first + memory[BEGUN] == iterable.start + 1 else UNNUMBERED


def _ignores_sigterm() -> bool:
    """Have this process ignore SIGTERM unless the program handles it; return whether it does.

    Slurm sends SIGTERM to all processes of a job that it takes away, and ranks are to save first. The host ends ranks
    by SIGKILL instead. ``SIG_IGN`` would count for the programs that this one starts.
    """
    own = threading.current_thread() is threading.main_thread()
    if own and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, functools.partial(_ignore, os.getpid()))
    return isinstance(handler := signal.getsignal(signal.SIGTERM), functools.partial) and handler.func is _ignore


def _ignore(rank: int, number: int, frame: object) -> None:
    if os.getpid() != rank:  # a process that it has forked ends, as by the default
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _stops(memory: memoryview[int]) -> bool:
    """Return whether all ranks end at this stop point; wait if it is the target."""
    while memory[TARGET] == memory[PASSED]:
        if memory[CONFIRMED] == memory[TARGET]:
            return True
        memory[WAITS_AT] = memory[TARGET]
        time.sleep(_POLL)
    return False


_opened: list[memoryview[int] | None] = []
"""The memory of this rank, or None without one; empty before the first call."""


def _memory() -> memoryview[int] | None:
    if not _opened:
        _opened.append(_open(os.environ.get(VARIABLE, "")))
    return _opened[0]


def _open(value: str) -> memoryview[int] | None:
    path, _, place = value.rpartition(":")
    try:
        first = int(place) * FIELDS
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = memoryview(mmap.mmap(file, 0)).cast("q")[first : first + FIELDS]
        finally:
            os.close(file)
    except (OSError, TypeError, ValueError):  # no host of ours, or its ranks have ended
        return None
    return memory if len(memory) == FIELDS and memory[MAGIC] == KEY else None
