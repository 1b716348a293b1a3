# SPDX-License-Identifier: BSD-3-Clause
"""The result of one start of a host, as JSON text: what a host writes for its backend, wherever the backend reads it.

The text is a torchelastic error file with further keys, so torchrun and TorchX can read it as well:

=================  ==============================================================================================
``message``        ``message``, ``errorCode`` and ``extraInfo``, as torch's ``ErrorHandler`` nests them; absent
                   while the host runs. The short form has a text instead, and ``errorCode`` beside it.
``rank_restarts``  how often this start has restarted the ranks; absent for 0
``final``          why the host must not be restarted (``no_retry_reason``); absent if it may be
``restarts``       how often the host was restarted; absent unless the host counts it itself
=================  ==============================================================================================

A rank can write such a text too: ``from_text`` drops every field that has another type or an impossible value. Where a
backend reads the text from the log alone, to which ranks write as well, the host signs it: the line carries a message
authentication code under a key that the backend creates for each job and gives only to its hosts.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torchx_monarch.model.job_result import JobResult
from torchx_monarch.system import error_files

KEY_VARIABLE = "MONARCH_RESULT_KEY"
"""The environment variable with the key of a host; unset where the backend does not read the result from the log."""

_SIGNED_LINE = re.compile(r"(?:\S+Z )??\[monarch\] result ([0-9a-f]{64}) (\{.*\})\s*")
"""A signed line, before which TorchX's scheduler for Kubernetes writes the time."""


@dataclass(frozen=True)
class HostResult:
    """How one start of a host, or of another program with a torchelastic error file, has ended.

    Attributes:
        code: exit code, 0..255, or -n for death by signal n; None if it is not known, as while the host runs.
        reason: the root cause in one line; empty while the host runs.
        failed_at: time of the failure in seconds since the epoch; 0 if unknown.
        is_secondary: whether the host only lost another host, or ended because of it.
        replica: id of the replica where the failure happened; -1 if unknown.
        is_short: whether the text has TorchX's short form, which a backend makes of an exit code where there is no
            error file.
        log: path of the root cause's stderr log on its host; empty without one.
    """

    code: int | None = None
    reason: str = ""
    traceback: str = ""
    failed_at: float = 0.0
    is_secondary: bool = False
    replica: int = -1
    rank_restarts: int = 0
    no_retry_reason: str = ""
    restarts: int | None = None
    is_short: bool = False
    log: str = ""

    @classmethod
    def from_job_result(cls, result: JobResult, *, rank_restarts: int = 0, no_retry_reason: str = "") -> HostResult:
        """Return the result of a host that ends now with the result of its job."""
        now, cause = time.time(), result.cause
        return cls(
            result.code,
            result.reason,
            cause.traceback if cause else "",
            cause.time if cause else now,
            result.consequence,
            cause.replica if cause else result.replica,
            rank_restarts,
            no_retry_reason,
            log=cause.stderr_path if cause else "",
        )

    @property
    def names_cause(self) -> bool:
        """Whether it reports a failure, and not only an exit code."""
        return bool(self.reason) and not self.is_short

    @property
    def forbids_restart(self) -> bool:
        """Whether the host has ended and must not be restarted."""
        return self.code is not None and bool(self.no_retry_reason)

    def to_text(self, limit: int = 0) -> str:
        """Return the text.

        Args:
            limit: the maximum size in bytes; 0 for no limit. The beginning of the traceback is cut first, then the end
                of the reason.
        """
        reason, traceback = self.reason, self.traceback
        text = self._text(reason, traceback)
        while limit and len(text) > limit and (reason or traceback):
            over = max(1, (len(text) - limit) // 12)  # JSON escapes an emoji to twelve
            if traceback:
                traceback = traceback[over:]
            else:
                reason = reason[:-over]
            text = self._text(reason, traceback)
        return text

    def _text(self, reason: str, traceback: str) -> str:
        values: dict[str, Any] = {"message": reason}
        if self.code is not None:
            values["errorCode"] = self.code
        if self.is_short:
            values["timestamp"] = int(self.failed_at)
        elif self.code is None and not self.reason:
            values = {}
        else:
            values["extraInfo"] = {
                "py_callstack": traceback,
                "timestamp": str(int(self.failed_at)),
                # A backend gets a result from every host and chooses the one to show by these two fields.
                "consequence": self.is_secondary,
                "replica": self.replica,
                **({"log": self.log} if self.log else {}),
            }
            values = {"message": values}
        beside = {"rank_restarts": self.rank_restarts, "final": self.no_retry_reason}
        values.update({key: value for key, value in beside.items() if value})
        if self.restarts is not None:
            values["restarts"] = self.restarts
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str | None) -> HostResult:
        """Parse a text that a host or any other program has written; an unreadable text is an empty ``HostResult``."""
        values = error_files.parse(text)
        message = values.get("message")
        is_short = isinstance(message, str)
        inner = values if is_short else message if isinstance(message, dict) else {}
        extra = inner.get("extraInfo", {})
        code = _integer(inner.get("errorCode"))
        return cls(
            code if code is not None and abs(code) < 256 else None,
            _text(inner.get("message")),
            _text(extra.get("py_callstack")),
            _seconds(extra.get("timestamp", inner.get("timestamp"))),
            extra.get("consequence") is True,
            max(-1, _integer(extra.get("replica"), -1)),
            max(0, _integer(values.get("rank_restarts"), 0)),
            _text(values.get("final")),
            _integer(values.get("restarts")),
            is_short,
            _text(extra.get("log")),
        )


def no_retry_reason(code: int, text: str | None) -> str:
    """Return why a failed host, with this exit code and result, must not be restarted; empty if it may be."""
    if code == os.EX_CONFIG:
        return f"exit code {code} (EX_CONFIG) asks for no restart"
    return HostResult.from_text(text).no_retry_reason


def why_no_other_start(result: JobResult, retry_on: Collection[int]) -> str:
    """Return why the hosts of a job must not be restarted, judged by the program's exit code; empty if they may be.

    A failure of hosts or machines, without a program as its cause, never forbids a restart.
    """
    if result.cause is not None and not result.cause.pid:
        return "the program cannot even begin"
    return forbidden_by(result.code, retry_on) if result.code and result.cause is not None else ""


def forbidden_by(code: int, retry_on: Collection[int]) -> str:
    """Return why a program that has ended with this exit code must not be started again; empty if it may be."""
    if reason := no_retry_reason(code, None):
        return reason
    if retry_on and code not in retry_on:
        return f"exit code {code} is not one of {', '.join(map(str, sorted(retry_on)))} (retry_on)"
    return ""


def signed(text: str, key: str) -> str:
    """Return a result's text as a signed line, without the ``[monarch]`` before it."""
    return f"result {_authentication_code(text, key)} {text}"


def verified(lines: Iterable[str], key: str) -> list[str]:
    """Return the texts of the log lines that were signed with the key, in order; none if the key is empty."""
    import hmac

    found = [match for line in lines if (match := _SIGNED_LINE.fullmatch(line))] if key else []
    return [match[2] for match in found if hmac.compare_digest(match[1], _authentication_code(match[2], key))]


def _authentication_code(text: str, key: str) -> str:
    import hashlib  # here: a supervisor imports this module, and signs nothing
    import hmac

    return hmac.new(key.encode(), text.encode(errors="backslashreplace"), hashlib.sha256).hexdigest()


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _integer(value: object, default: Any = None) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _seconds(value: object) -> float:
    """Return a time in seconds since the epoch, which torch writes as a text; 0 if it is none."""
    try:
        seconds = float(value) if isinstance(value, (str, int, float)) else 0.0
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and 0 <= seconds < 1e11 else 0.0
