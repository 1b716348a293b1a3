# SPDX-License-Identifier: BSD-3-Clause
"""List and follow the runs of a live allocation: from its hosts, or from the run logs that are kept after their end.

The backend says where the logs are (``Backend.folder``). All functions raise ``AllocationError`` if the hosts have
ended and no run is kept, or did not start in time, ``UnreachableError`` if they cannot be reached, and ``RefusedError``
if there is no such run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from torchx_monarch.client.connection import TIMEOUT, Connection
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.result import RunInfo
from torchx_monarch.client.run import Records, RunRecords
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.model import codec
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.system import safe_files

RUNS = {"type": "runs"}
"""The greeting that asks for the runs of an allocation."""

_NOT_ENDED = "the hosts ended before the run did"

_LAST_RECORD = 1 << 17
"""Bytes at the end of a run log in which its last record is: a record is a message, of at most 64 kB."""

_MAX_LINE = 1 << 20
"""Bytes that are read of a run log at a time, if it has no line feed: a rank may have written to it."""

T = TypeVar("T")


class StoredRecords:
    """Iterate over the records of a run log, up to a result."""

    def __init__(self, run: int, path: Path) -> None:
        self.run = run
        self._path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the records; if the log has none of a result, one that says so is the last.

        Raises:
            RefusedError: the log was removed, or is no regular file of this user.
        """
        try:
            fd = safe_files.open_file(self._path)
        except OSError as error:
            raise RefusedError(f"run {self.run} cannot be read: {error}") from None
        with open(fd, "rb") as file:
            while line := file.readline(_MAX_LINE):
                record = _record(line)
                if _is_sound(record):
                    yield record
                    if record["type"] == "result":
                        return
        yield {
            "type": "result",
            "run": self.run,
            "exit_code": 1,
            "reason": _NOT_ENDED,
            "stopped": True,
            "cause": None,
            "seconds": 0.0,
            "code": "",
        }

    def close(self) -> None:
        """Do nothing: the file is closed when the iteration ends."""


def follow_run(hosts: Hosts, run: int | None) -> RunRecords:
    """Return the records of a run, or the last, from the hosts or, if they have ended, from the kept run logs."""
    try:
        return Records.request(hosts, {"type": "follow", "run": run})
    except AllocationError as error:
        logs = _stored_logs(hosts, error)
        number = max(logs, default=0) if run is None else run
        if number not in logs:
            numbers = ", ".join(map(str, logs)) or "none"
            raise RefusedError(f"run {run if run is not None else ''} is not kept; those kept are: {numbers}") from None
        return StoredRecords(number, logs[number])


def ask_runs(hosts: Hosts) -> list[RunInfo]:
    """Return the runs that the hosts know, the ended ones first, then the current one and the queue."""
    with hosts.open(RUNS) as link:
        try:
            return read_runs(link)
        except TimeoutError:
            raise UnreachableError(f"{hosts.handle}: replica 0 has not answered within {TIMEOUT:g} s") from None


def read_runs(link: Connection, timeout: float = TIMEOUT) -> list[RunInfo]:
    """Read the answer to ``RUNS``, in parts, each within a time; without its end if the connection breaks."""
    found: list[RunInfo] = []
    while (answer := link.receive(timeout)) is not None:
        found += answer["runs"]
        if not answer["more"]:
            break
    return found


def list_runs(hosts: Hosts) -> list[RunInfo]:
    """Return the runs that the hosts know or, if they have ended, those that are kept; the oldest first."""
    try:
        return ask_runs(hosts)
    except AllocationError as error:
        return [_info(number, path) for number, path in _stored_logs(hosts, error).items()]


def _stored_logs(hosts: Hosts, error: AllocationError) -> dict[int, Path]:
    """Return the paths of the run logs by number, in order; raise the error if the allocation has not ended."""
    if not hosts.end_reason:
        raise error
    folder = hosts.log_folder()
    if folder is None:
        reason = f"{error}. Its runs were kept by its hosts alone; for its log: torchx log {hosts.handle}"
        raise AllocationError(reason) from None
    found: dict[int, Path] = {}
    for number in sorted(safe_files.numbered(folder, "run_")):
        path = folder / f"run_{number}" / "journal.jsonl"
        if path.is_file():
            found[number] = path
    return found


@dataclasses.dataclass
class _BegunRecord:
    """The record with which a log begins."""

    command: str = ""
    cwd: str = ""
    code: str = ""
    by: str = ""
    submitted: Seconds = 0.0


_Stream = enum.Enum("_Stream", {"STDOUT": "stdout", "STDERR": "stderr"})


@dataclasses.dataclass
class _ResultRecord:
    run: int
    exit_code: int
    reason: str
    stopped: bool
    cause: int | None
    seconds: Seconds
    code: str
    started: Seconds = 0.0


_RECORDS: dict[str, type[Any]] = {
    "phase": dataclasses.make_dataclass("_Phase", [("text", str)]),
    "output": dataclasses.make_dataclass(
        "_Output",
        [("rank", int), ("stream", _Stream), ("text", str), ("prefix", str, ""), ("stamped", bool, False)],
    ),
    "exit": dataclasses.make_dataclass("_Exit", [("exit", RankExit)]),
    "attempts": dataclasses.make_dataclass("_Attempts", [("count", int)]),
    "result": _ResultRecord,
}
"""The fields on which ``Collector`` relies, by the type of the record."""


def _first_and_last(path: Path) -> tuple[_BegunRecord | None, _ResultRecord | None]:
    """Return the record of a run, with which its log begins, and its result; None for an absent one."""
    first, last = b"", b""
    # OSError: it was removed, or is no file of this user. What is known is its number.
    with contextlib.suppress(OSError), open(safe_files.open_file(path), "rb") as file:
        first = file.readline(_LAST_RECORD)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_RECORD))
        last = file.read(_LAST_RECORD).rstrip(b"\n").rpartition(b"\n")[2]
    return _decoded(_record(first), "run", _BegunRecord), _decoded(_record(last), "result", _ResultRecord)


def _info(number: int, path: Path) -> RunInfo:
    first, last = _first_and_last(path)
    begun = first or _BegunRecord()
    state = "stopped" if last is None or last.stopped else "failed" if last.exit_code else "succeeded"
    return RunInfo(
        run=number,
        state=state,
        command=begun.command,
        cwd=begun.cwd,
        code=begun.code,
        by=begun.by,
        submitted=begun.submitted,
        started=last.started if last else 0.0,
        ended=last.started + last.seconds if last and last.started else 0.0,
        exit_code=last.exit_code if last else None,
        reason=last.reason if last else _NOT_ENDED,
    )


def _record(line: bytes) -> dict[str, Any]:
    """Parse a record; empty if the line is none."""
    try:
        record = safe_files.parse_json(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("type"), str) else {}


def _decoded(record: dict[str, Any], kind: str, cls: type[T]) -> T | None:
    """Return a record of this type as a data class; None if it has another type, or a field of it has."""
    with contextlib.suppress(codec.DecodeError):
        return codec.decode(cls, record) if record.get("type") == kind else None
    return None


def _is_sound(record: dict[str, Any]) -> bool:
    """Return whether a record has a type that ``Collector`` knows, and the fields of this type."""
    return any(_decoded(record, kind, cls) is not None for kind, cls in _RECORDS.items())
