# SPDX-License-Identifier: BSD-3-Clause
"""Stacks of ranks and of their child processes: parse what ``faulthandler`` prints, group, and render.

A rank may write anything where its host reads stacks. So lines that are none of a stack are dropped, numbers are
limited, and names are escaped.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from torchx_monarch.model.codec import Shared
from torchx_monarch.model.world import consecutive
from torchx_monarch.system.untrusted_text import one_line

_MAX_THREADS = 200
"""Threads of one process that are read; ``faulthandler`` prints at most 100."""

_MAX_FRAMES = 200
"""Frames of one thread that are read; ``faulthandler`` prints at most 100."""

_MAX_NAME = 300
"""Characters of a file's or a function's name that are kept."""

_MAX_RANGES = 200
"""Ranges of ranks that are shown. The first rank of each of 8,192 hosts alone would take 45,000 characters."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})")
"""A character that is not ASCII, as ``faulthandler`` writes it."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call on a stack: the line is 0 if it is not known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''} in {self.function}"


@dataclasses.dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread, the most recent call first; it is empty if the thread is in no Python function."""

    name: str
    frames: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True)
class KernelWait:
    """What the main thread of a process does in the kernel.

    Attributes:
        state: ``R`` running, ``S`` sleeping, ``D`` uninterruptible, ``T`` stopped; empty if it is gone.
        call: the name of the system call in which it waits; empty for none, or one of no interest.
        path: the file or the socket of that call; empty if it has none.
    """

    state: str = ""
    call: str = ""
    path: str = ""


@dataclasses.dataclass(frozen=True)
class ProcessStacks:
    """The stacks of a rank's process, or of a process that the rank has started.

    Attributes:
        child: name of the process if the rank has started it; empty for the rank's own process.
        threads: the stacks of its threads, that of the main thread first.
        problem: why there are no stacks; empty if there are.
        wait: what the main thread did in the kernel just before.
    """

    rank: int
    replica: int
    pid: int
    child: str = ""
    threads: tuple[ThreadStack, ...] = ()
    problem: str = ""
    wait: KernelWait = KernelWait()


@dataclasses.dataclass(frozen=True)
class SharedStacks:
    """The stacks of processes that are where each other is: of each its rank, replica and process id."""

    processes: tuple[tuple[int, ...], ...]
    child: str
    threads: Shared[tuple[ThreadStack, ...]]
    problem: str
    wait: KernelWait = KernelWait()

    def each_process(self) -> list[ProcessStacks]:
        """Return the stacks of each process."""
        return [
            ProcessStacks(rank, replica, pid, self.child, self.threads, self.problem, self.wait)
            for rank, replica, pid in self.processes
        ]


def shared_stacks(stacks: Iterable[ProcessStacks | SharedStacks]) -> list[SharedStacks]:
    """Put together the processes whose stacks are equal."""
    found: dict[tuple[str, tuple[ThreadStack, ...], str, KernelWait], list[tuple[int, ...]]] = {}
    for entry in stacks:
        own = entry.processes if isinstance(entry, SharedStacks) else [(entry.rank, entry.replica, entry.pid)]
        found.setdefault((entry.child, entry.threads, entry.problem, entry.wait), []).extend(own)
    return [SharedStacks(tuple(processes), *stack) for stack, processes in found.items()]


def parse_faulthandler(text: str, own_files: Iterable[str] = ()) -> tuple[ThreadStack, ...]:
    """Parse the stacks of all threads as ``faulthandler`` prints them; return that of the main thread, its last, first.

    Frames of ``own_files``, those that run the program, are left out where they are below all others.
    """
    own, threads, frames = frozenset(own_files), list[ThreadStack](), None
    for line in text.split("\n"):
        if found := _THREAD.match(line):
            if len(threads) == _MAX_THREADS:
                break
            frames = list[Frame]()
            threads.append(ThreadStack(_name(found[1] or ""), ()))
        elif frames is not None and len(frames) < _MAX_FRAMES and (found := _FRAME.match(line)):
            number = 0 if found[2] == "???" else int(found[2])
            frames.append(Frame(_name(found[1]), number, _name(found[3])))
            threads[-1] = dataclasses.replace(threads[-1], frames=tuple(frames))
    return tuple(dataclasses.replace(thread, frames=_without(own, thread.frames)) for thread in reversed(threads))


def _name(text: str) -> str:
    return one_line(unescaped(text), _MAX_NAME)


def unescaped(text: str) -> str:
    """Return a text of ``faulthandler`` with the characters that it has escaped."""
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), text)


def _without(own: frozenset[str], frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return frames without those of our files at the end, nor those of the interpreter's own start below them."""
    end = len(frames)
    while end and not frames[end - 1].line:
        end -= 1
    program = end
    while program and frames[program - 1].file in own:
        program -= 1
    return frames[:program] if program < end else frames


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks in the form ``rank 3`` or ``ranks 0-2,4-7``, and how many more after many ranges."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [number for first, last in consecutive(ranks)[:_MAX_RANGES] for number in range(first, last + 1)]
    return f"ranks {ranges(shown)}" + (f" and {len(ranks) - len(shown)} more" if len(shown) < len(ranks) else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in the form ``0-2,4-7``."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in consecutive(numbers))


def render(stacks: Iterable[ProcessStacks]) -> list[str]:
    """Return the lines that show stacks to a person, equal ones once: the main threads of ranks first, rarest first."""
    found: dict[tuple[int, str, tuple[Frame, ...], str], list[ProcessStacks]] = {}
    for process in sorted(stacks, key=lambda process: (process.rank, process.child, process.pid)):
        prefix = f"{process.child}, " if process.child else ""
        first = process.threads[0].frames if process.threads else ()
        key = (1 if process.child else 0, f"{prefix}main thread", first, process.problem)
        found.setdefault(key, []).append(process)
        for thread in process.threads[1:]:
            if thread.frames:  # a thread that is in no Python function tells nothing
                what = f"{prefix}{f'thread {thread.name}' if thread.name else 'other thread'}"
                found.setdefault((2, what, thread.frames, ""), []).append(process)
    shown = []
    for (order, what, frames, problem), alike in found.items():
        ranks = sorted({process.rank for process in alike})
        where = f" (host {alike[0].replica}, pid {alike[0].pid})" if len(alike) == 1 else ""
        if len(alike) > len(ranks):
            where = f" ({len(alike)} of them)"
        text = f": {problem}" if problem else ""
        lines = [one_line(f"{rank_ranges(ranks)}{where}: {what}{text}")]
        lines += [f"    {one_line(str(frame))}" for frame in frames]
        if not frames and not problem:
            lines.append("    (in no Python function)")
        shown.append((order, len(ranks), ranks, lines))
    return [line for *_, lines in sorted(shown, key=lambda entry: entry[:3]) for line in lines]
