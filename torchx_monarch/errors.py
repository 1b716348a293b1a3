# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What went wrong and who started it.

``RankExit`` is how one rank ended, ``Verdict`` how the job ended; ``root_cause`` picks the one from the others. All are
plain values that survive JSON and pickling.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any


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
        stopped: whether we had told it to stop; such an exit is never a cause.
        stderr_path: its own log file on its host.
        error: what its torchelastic error file holds, if it wrote one.
    """

    rank: int
    local_rank: int
    replica: int
    hostname: str
    pid: int
    code: int
    time: float
    stopped: bool = False
    stderr_path: str = ""
    error: Mapping[str, Any] | None = None

    @property
    def failed(self) -> bool:
        """Whether this exit can be the cause of the job's failure."""
        return self.code != 0 and not self.stopped

    @property
    def message(self) -> str:
        """``ValueError: boom`` from the error file; empty without one."""
        message = (self.error or {}).get("message", "")
        return str(message.get("message", "") if isinstance(message, Mapping) else message)

    @property
    def traceback(self) -> str:
        """The Python traceback from the error file; empty without one."""
        message = (self.error or {}).get("message")
        extra = message.get("extraInfo") if isinstance(message, Mapping) else None
        return str(extra.get("py_callstack", "")) if isinstance(extra, Mapping) else ""

    def describe(self) -> str:
        """One line: who, where, how."""
        where = f"local rank {self.local_rank} on {self.hostname}, pid {self.pid}"
        said = f": {self.message}" if self.message else ""
        return f"rank {self.rank} ({where}) {describe_code(self.code)}{said}"

    def to_json(self) -> dict[str, Any]:
        """As the plain values that a message carries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankExit:
        """The inverse of ``to_json``."""
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the job ended.

    Attributes:
        code: exit code of the job, 0..255; the root cause's, 128+n for a signal.
        reason: one line for a person.
        cause: the rank that began it, where a rank did.
    """

    code: int
    reason: str
    cause: RankExit | None = None

    def error_file(self) -> str:
        """The content of a torchelastic error file that says this (see torch's ``ErrorHandler.record_exception``)."""
        when = self.cause.time if self.cause else time.time()
        extra = {"py_callstack": self.cause.traceback if self.cause else "", "timestamp": str(int(when))}
        return json.dumps({"message": {"message": self.reason, "errorCode": self.code, "extraInfo": extra}})

    def to_json(self) -> dict[str, Any]:
        """As the plain values that a message carries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """The inverse of ``to_json``."""
        cause = values.get("cause")
        return cls(values["code"], values["reason"], RankExit.from_json(cause) if cause else None)


def root_cause(exits: Iterable[RankExit]) -> RankExit | None:
    """The first rank that failed by itself: those that we stopped cannot have begun it."""
    return min((one for one in exits if one.failed), key=lambda one: (one.time, one.rank), default=None)
