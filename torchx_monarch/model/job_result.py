# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The exits of ranks, the root cause among them, and the result of a job.

``RankExit`` is how one rank ended, ``JobResult`` how the job ended; ``root_cause`` picks the rank that failed first.
All are plain values that survive JSON and pickling.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line

_PEER_IS_GONE = re.compile(
    # What gloo, NCCL, TCPStore and sockets say of a connection whose other end has died.
    r"Connection (reset|closed) by peer|Connection refused|Broken pipe|recvValue failed|failed to recv|"
    r"Socket Timeout|NCCL communicator was aborted|ncclRemoteError|remote process exited"
)

_RANKS_SHOWN = 3


def describe_code(code: int) -> str:
    """An exit code in words: ``exited with code 3``, ``was killed by signal 9 (SIGKILL)`` for -9."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unnamed"
    return f"was killed by signal {-code} ({name})"


def shell_code(code: int) -> int:
    """A shell's exit status for a wait status: 128+n for death by signal n (code -n)."""
    return 128 - code if code < 0 else code


FINAL = "final"
"""In an error file, beside torch's ``message``: why a host is not to be started again; absent where it may be."""

RANK_RESTARTS = "rank_restarts"
"""In a termination message: how often this start of a replica 0 has started the ranks again."""


def read_error_file(error: str | None) -> Mapping[str, Any]:
    """What an error file holds, or a container's termination message; empty where it is none of ours or torch's."""
    try:
        data = safe_files.parse_json(error or "null")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def extra_info(error: str | None) -> Mapping[str, Any]:
    """What an error file says beside its message (``JobResult.error_file``); empty where it says nothing."""
    message = read_error_file(error).get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}


def is_secondary(error: str | None) -> bool:
    """Whether a replica's error file says only that it has lost another, or has ended because another had."""
    return extra_info(error).get("consequence") is True


def no_retry_reason(code: int, error: str | None) -> str:
    """Why a replica that has failed is not to be started again; empty where it may be.

    Args:
        code: its exit code.
        error: the content of its error file; None without one.
    """
    if code == os.EX_CONFIG:
        return f"exit code {code} (EX_CONFIG) asks for no other start"
    return str(read_error_file(error).get(FINAL, ""))


@dataclasses.dataclass(frozen=True)
class RankExit:
    """How one rank ended.

    Attributes:
        rank: global rank.
        local_rank: its number on its host.
        replica: id of its host's replica.
        hostname: where it ran.
        pid: its process.
        code: exit code, -n for death by signal n.
        time: seconds since the epoch.
        stopped_at: when we told it to stop; None when we did not.
        stderr_path: its own log file on its host.
        error: what its torchelastic error file holds, if it wrote one.
        timer: scope of the timer that expired, where its end is the watchdog's doing.
        started: when its program was started, in seconds since the epoch.
        out_of_memory: what says that the kernel killed it for want of memory; empty where nothing does.
    """

    rank: int
    local_rank: int
    replica: int
    hostname: str
    pid: int
    code: int
    time: float
    stopped_at: float | None = None
    stderr_path: str = ""
    error: Mapping[str, Any] | None = None
    timer: str = ""
    started: float = 0.0
    out_of_memory: str = ""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself, not because we had told it to stop."""
        return self.code != 0 and (self.stopped_at is None or self.failed_at < self.stopped_at)

    @property
    def failed_at(self) -> float:
        """When it went wrong: when the exception was raised, where it says so. An interpreter's end takes a while."""
        raised = self._extra.get("raised_at")
        return float(raised) if isinstance(raised, (int, float)) else self.time

    @property
    def began(self) -> bool:
        """Whether the first line of the program ran; a script that cannot be compiled is no use to start again."""
        return self._extra.get("began", True) is not False

    @property
    def joined(self) -> bool | None:
        """Whether it had been in a process group, of a rank that failed in forming one; None of any other."""
        joined = self._extra.get("joined")
        return joined if isinstance(joined, bool) else None

    @property
    def is_collateral(self) -> bool:
        """Whether it says of itself that a peer had gone: the consequence of another's failure, if there is one."""
        return bool(_PEER_IS_GONE.search(self.message))

    @property
    def message(self) -> str:
        """``ValueError: boom`` from the error file; empty without one."""
        message = (self.error or {}).get("message", "")
        return str(message.get("message", "") if isinstance(message, Mapping) else message)

    @property
    def traceback(self) -> str:
        """The Python traceback from the error file; empty without one."""
        return str(self._extra.get("py_callstack", ""))

    @property
    def _extra(self) -> Mapping[str, Any]:
        message = (self.error or {}).get("message")
        extra = message.get("extraInfo") if isinstance(message, Mapping) else None
        return extra if isinstance(extra, Mapping) else {}

    def describe(self) -> str:
        """One line: who, where, how."""
        where = f"local rank {self.local_rank} on {self.hostname}, pid {self.pid}"
        timer = f": its timer {self.timer!r} expired" if self.timer else ""
        memory = f": {self.out_of_memory}" if self.out_of_memory else ""
        said = f": {one_line(self.message)}" if self.message else ""
        return f"rank {self.rank} ({where}) {describe_code(self.code)}{timer}{memory}{said}"

    def to_json(self) -> dict[str, Any]:
        """As the plain values that a message carries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankExit:
        """The inverse of ``to_json``."""
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How the job ended.

    Attributes:
        code: exit code of the job, 0..255; the root cause's, 128+n for a signal.
        reason: one line for a person.
        cause: the rank that began it, where a rank did.
        stopped: whether it was told to end.
        consequence: whether it says only that a host was lost: not why, which that host or its backend may know.
        replica: of the host to which it happened, where it is no rank's; -1 for none.
    """

    code: int
    reason: str
    cause: RankExit | None = None
    stopped: bool = False
    consequence: bool = False
    replica: int = -1

    def error_file(self, limit: int = 0, **further: object) -> str:
        """The content of a torchelastic error file that says this (see torch's ``ErrorHandler.record_exception``).

        Args:
            limit: bytes that it may have; 0 for any number. Of a traceback its beginning goes, then the reason's end.
            further: what else it is to hold beside torch's own ``message``.
        """
        when = self.cause.time if self.cause else time.time()
        extra: dict[str, object] = {
            "py_callstack": self.cause.traceback if self.cause else "",
            "timestamp": str(int(when)),
            # For the backend, which has such a file from every replica and shows one.
            "consequence": self.consequence,
            "replica": self.cause.replica if self.cause else self.replica,
        }
        message: dict[str, object] = {"message": self.reason, "errorCode": self.code, "extraInfo": extra}
        text = json.dumps({"message": message, **further})
        for holder, key, end in ((extra, "py_callstack", 0), (message, "message", -1)):
            while limit and len(text) > limit and (value := str(holder[key])):
                over = max(1, (len(text) - limit) // 6)  # JSON writes some characters as six
                holder[key] = value[:-over] if end else value[over:]
                text = json.dumps({"message": message, **further})
        return text

    def to_json(self) -> dict[str, Any]:
        """As the plain values that a message carries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> JobResult:
        """The inverse of ``to_json``; what else the message holds is left out."""
        cause = values.get("cause")
        exit = RankExit.from_json(cause) if cause else None
        others = [field.name for field in dataclasses.fields(cls) if field.name != "cause"]
        return cls(cause=exit, **{name: values[name] for name in others})


def root_cause(exits: Iterable[RankExit]) -> RankExit | None:
    """The rank that began it: the first that failed by itself, and one that blames a peer only if none else has."""
    failed = (one for one in exits if one.failed)
    return min(failed, key=lambda one: (one.is_collateral, one.failed_at, one.rank), default=None)


def others_in_words(exits: Iterable[RankExit], cause: RankExit) -> list[str]:
    """A line for each way in which ranks other than the cause failed: ``ranks 3, 7 and 510 more: ...``.

    Complaints about a peer that differ in numbers alone, an address or a port, are one; the lowest rank's is shown.
    """
    groups: dict[str, tuple[str, list[int]]] = {}
    for one in sorted(exits, key=lambda each: each.rank):
        if one.failed and one.rank != cause.rank:
            how = describe_code(one.code) + (f": {one_line(one.message)}" if one.message else "")
            if one.is_collateral:
                how += " (a consequence)"
            way = re.sub(r"\d+", "N", how) if one.is_collateral else how
            groups.setdefault(way, (how, []))[1].append(one.rank)
    return [f"{_ranks_in_words(ranks)} {how}" for how, ranks in groups.values()]


def _ranks_in_words(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ranks if len(ranks) <= _RANKS_SHOWN + 1 else ranks[:_RANKS_SHOWN]
    if len(shown) < len(ranks):
        return f"ranks {', '.join(map(str, shown))} and {len(ranks) - len(shown)} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
