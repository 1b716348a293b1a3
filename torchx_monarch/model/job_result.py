# SPDX-License-Identifier: BSD-3-Clause
"""Describe how ranks and jobs end, and choose the root cause.

``RankExit`` is the exit of one rank, ``JobResult`` the result of the job. ``root_cause`` chooses the rank that failed
first. All are plain values that survive JSON.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torchx_monarch.model.codec import Seconds
from torchx_monarch.system.untrusted_text import one_line

_OF_WORKER = re.compile(r"\S+: Caught \S+ (?P<where>in .+?)\.\nOriginal (?P<trace>Traceback .*)", re.DOTALL)
"""The message of an exception that torch brings from another process or thread (``torch._utils.ExceptionWrapper``)."""

_PEER_IS_GONE = re.compile(
    # Messages of gloo, NCCL, TCPStore and sockets about a connection whose peer has died.
    r"Connection (reset|closed) by peer|Connection refused|Broken pipe|recvValue failed|failed to recv|"
    r"Socket Timeout|NCCL communicator was aborted|ncclRemoteError|remote process exited"
)

EARLY_FAILURES_WITHIN = 1.0
"""Seconds for which the other ranks may run on after an early failure (``RankExit.is_early``). A wrong option ends all
ranks within moments of each other, and they are to be reported as one cause."""

_RANKS_SHOWN = 3


def describe_code(code: int) -> str:
    """Describe an exit code in words: ``exited with code 3``, ``was killed by signal 9 (SIGKILL)`` for -9."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unnamed"
    return f"was killed by signal {-code} ({name})"


def shell_code(code: int) -> int:
    """Convert an exit code to a shell's exit status: 128+n for death by signal n (code -n)."""
    return 128 - code if code < 0 else code


def describe_shell_code(code: int) -> str:
    """Describe the exit status of a shell or a container in words; 128+n is death by signal n."""
    return describe_code(128 - code if code > 128 else code)


@dataclasses.dataclass(frozen=True)
class StepsDone:
    """The steps that a rank has done in an attempt, from the first to the last, and when.

    ``saved`` is when its last checkpoint, that of the step ``checkpoint``, was complete; None for none.
    """

    first: int
    last: int
    began: Seconds
    ended: Seconds
    checkpoint: int | None = None
    saved: Seconds | None = None


@dataclasses.dataclass(frozen=True)
class RankExit:
    """The exit of one rank, or of the command of a replica.

    Attributes:
        rank: the rank; the replica of a command.
        local_rank: the local rank; -1 for a command.
        pid: process id; 0 for a command that could not be started.
        code: exit code, -n for death by signal n.
        time: when the process ended, in seconds since the epoch.
        stopped_at: when the host asked the rank to stop, in seconds since the epoch; None if it did not.
        error: parsed content of its torchelastic error file; None if it wrote none.
        timer: scope of the timer that expired, if the watchdog ended the rank; else empty.
        started: when its program was started, in seconds since the epoch.
        out_of_memory: evidence that the kernel killed the rank for lack of memory; empty without evidence.
        hang: why the rank was stopped as the one for which others waited in a collective; empty if it was not.
        steps: the steps that its program has reported, or has done in loops of ``training.steps``; None for none.
        grouped: when it formed its first process group, in seconds since the epoch; None if it has not, or that is not
            known.
        failure_reported_at: when it told its host that its program had failed, in seconds since the epoch; None if it
            has not. A rank does so that has a process group, before peers can notice that it ends.
        last_output: the last line that it printed, if it has an exit code above 0 and no error file; else empty.
    """

    rank: int
    local_rank: int
    replica: int
    hostname: str
    pid: int
    code: int
    time: Seconds
    stopped_at: Seconds | None = None
    stderr_path: str = ""
    error: Mapping[str, Any] | None = None
    timer: str = ""
    started: Seconds = 0.0
    out_of_memory: str = ""
    hang: str = ""
    steps: StepsDone | None = None
    grouped: Seconds | None = None
    failure_reported_at: Seconds | None = None
    last_output: str = ""

    @property
    def step(self) -> int | None:
        """The last step that its program has done; None if that is not known."""
        return None if self.steps is None else self.steps.last

    @property
    def is_command(self) -> bool:
        """Whether it is that of a command, and not of a rank."""
        return self.local_rank < 0

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself: it had not been asked to stop before."""
        return self.code != 0 and (self.stopped_at is None or self.failed_at < self.stopped_at)

    @property
    def failed_at(self) -> float:
        """Time of the failure in seconds since the epoch: of the exception, if that is known, else of the exit.

        The interpreter may take a while to exit after the exception. The error file has no ``SystemExit``.
        """
        raised = self._extra.get("raised_at")
        if isinstance(raised, (int, float)):
            return float(raised)
        return self.time if self.failure_reported_at is None else self.failure_reported_at

    @property
    def is_early(self) -> bool:
        """Whether it failed before it formed a process group: no rank waits for it, and others may be about to fail."""
        return self.failed and self.code > 0 and self.grouped is None

    @property
    def began(self) -> bool:
        """Whether the first line of the program ran. A script that does not compile is not restarted."""
        return self._extra.get("began", True) is not False

    @property
    def joined(self) -> bool | None:
        """Whether a rank that failed to form a process group had been in one before; None for any other failure."""
        joined = self._extra.get("joined")
        return joined if isinstance(joined, bool) else None

    @property
    def is_collateral(self) -> bool:
        """Whether the error message blames a lost peer: a secondary failure if another rank failed by itself."""
        return bool(_PEER_IS_GONE.search(self.message))

    @property
    def message(self) -> str:
        """The message of the error file, such as ``ValueError: boom``; empty without an error file."""
        message = (self.error or {}).get("message", "")
        return str(message.get("message", "") if isinstance(message, Mapping) else message)

    @property
    def traceback(self) -> str:
        """The Python traceback of the error file; empty without one."""
        return str(self._extra.get("py_callstack", ""))

    @property
    def _extra(self) -> Mapping[str, Any]:
        message = (self.error or {}).get("message")
        extra = message.get("extraInfo") if isinstance(message, Mapping) else None
        return extra if isinstance(extra, Mapping) else {}

    @property
    def _cause(self) -> str:
        """The message in one line; that of the exception in a DataLoader's worker, if it has the worker's traceback."""
        if (found := _OF_WORKER.match(self.message)) is not None:
            last = found["trace"].rpartition("Traceback (most recent call last):\n")[2]
            if (raised := re.search(r"^\S.*", last, re.MULTILINE | re.DOTALL)) is not None:
                return one_line(f"{raised[0].rstrip()} ({found['where']})")
        return one_line(self.message)

    def describe(self) -> str:
        """Describe the exit in one line: rank, host, pid, exit code, reason."""
        where = f"local rank {self.local_rank} on {self.hostname}, pid {self.pid}"
        if self.hang:
            return f"hang: {one_line(self.hang)} ({where})"
        who = f"rank {self.rank} ({where})"
        if self.is_command:
            who = f"the command of replica {self.rank} ({self.hostname}{f', pid {self.pid}' if self.pid else ''})"
        timer = f": its timer {self.timer!r} expired" if self.timer else ""
        memory = f": {self.out_of_memory}" if self.out_of_memory else ""
        message = f": {self._cause}" if self.message and self.pid else self._output
        return f"{who} {self._how}{timer}{memory}{message}"

    @property
    def _how(self) -> str:
        return describe_code(self.code) if self.pid else f"could not be started: {self._cause}"

    @property
    def _output(self) -> str:
        return f"; last output: {one_line(self.last_output)}" if self.last_output else ""


@dataclasses.dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Attributes:
        code: exit code of the job, 0..255; the root cause's, 128+n for a signal.
        reason: one line for the user.
        cause: the root cause, if it is a rank; else None.
        stopped: whether the job ended because it was asked to stop.
        consequence: whether the result only reports that a host was lost; that host or its backend may know why.
        replica: id of the replica where the failure happened, if the cause is not a rank; -1 for none.
    """

    code: int
    reason: str
    cause: RankExit | None = None
    stopped: bool = False
    consequence: bool = False
    replica: int = -1


def root_cause(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the rank that failed first; None if no rank failed by itself.

    A rank that blames a lost peer is chosen only if no other rank failed.
    """
    failed = (rank_exit for rank_exit in exits if rank_exit.failed)
    return min(failed, key=lambda found: (found.is_collateral, found.failed_at, found.rank), default=None)


def steps_of_all(exits: Iterable[RankExit]) -> StepsDone | None:
    """Return the steps that all ranks have done of which any are known; None if none is."""
    known = (ended.steps for ended in exits if ended.steps is not None)
    return min(known, key=lambda steps: steps.last, default=None)


def describe_failure(exits: Collection[RankExit], cause: RankExit, world_size: int) -> str:
    """Describe the failure of an attempt in one line: ``all 4 ranks: No module named nope`` if all failed alike.

    If only some ranks failed, all of them alike, the line names them. If they failed differently, it describes the root
    cause alone, and ``describe_others`` the others.
    """
    if not (alike := failed_alike(exits, cause)):
        return cause.describe()
    what = _noun(cause)
    who = f"all {world_size} {what}s" if len(alike) == world_size else f"{_in_words(what, alike)} of {world_size}"
    return f"{who}: {cause._cause if cause.message and cause.pid else cause._how + cause._output}"


def failed_alike(exits: Collection[RankExit], cause: RankExit) -> list[int]:
    """Return the ranks that failed by themselves if there are several and all failed like the root cause; else none."""
    failed = [rank_exit for rank_exit in exits if rank_exit.failed]
    if len(failed) < 2 or cause.is_collateral or cause.timer or cause.out_of_memory or cause.hang:
        return []
    alike = all((rank_exit.code, rank_exit.message) == (cause.code, cause.message) for rank_exit in failed)
    return sorted(rank_exit.rank for rank_exit in failed) if alike else []


def describe_others(exits: Collection[RankExit], cause: RankExit) -> list[str]:
    """Describe how the ranks other than the root cause failed, one line per kind: ``ranks 3, 7 and 510 more: ...``.

    Ranks that blame a lost peer are left out. If all failed alike, ``describe_failure`` has said so, and there is none.
    """
    groups: dict[str, list[int]] = {}
    if failed_alike(exits, cause):
        return []
    for rank_exit in sorted(exits, key=lambda rank_exit: rank_exit.rank):
        if rank_exit.failed and not rank_exit.is_collateral and rank_exit.rank != cause.rank:
            how = rank_exit._how + (f": {rank_exit._cause}" if rank_exit.message and rank_exit.pid else "")
            groups.setdefault(how, []).append(rank_exit.rank)
    return [f"{_in_words(_noun(cause), ranks)} {how}" for how, ranks in groups.items()]


def _noun(cause: RankExit) -> str:
    return "replica" if cause.is_command else "rank"


def _in_words(noun: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown = numbers if len(numbers) <= _RANKS_SHOWN + 1 else numbers[:_RANKS_SHOWN]
    if len(shown) < len(numbers):
        return f"{noun}s {', '.join(map(str, shown))} and {len(numbers) - len(shown)} more"
    return f"{noun}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
