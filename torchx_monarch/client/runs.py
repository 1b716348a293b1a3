# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""List and follow the runs of a live allocation: from its hosts, or from the run logs that are kept after their end.

The backend says where the logs are (``Backend.log_folder``). Ranks could write to these files, so a field is used only
if it has the expected type.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from torchx_monarch.client.connection import TIMEOUT, Connection
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.result import RunInfo
from torchx_monarch.client.run import Records, RunRecords
from torchx_monarch.exceptions import AllocationError, RefusedError
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.system import safe_files

RUNS = {"type": "runs"}
"""The greeting that asks for the runs of an allocation."""

_NOT_ENDED = "the hosts ended before the run did"

_LAST_RECORD = 1 << 17
"""Bytes at the end of a run log in which its last record is: a record is a message, of at most 64 kB."""

T = TypeVar("T", str, int, float, bool)


class KeptRecords:
    """Iterate over the records of a run log, up to a result.

    Attributes:
        run: number of the run.

    Args:
        run: number of the run.
        path: path of the run log.
    """

    def __init__(self, run: int, path: Path) -> None:
        self.run = run
        self._path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the records; if the log has none of a result, one that says so is the last."""
        with open(safe_files.open_file(self._path), "rb") as file:
            for line in file:
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
    """Return the records of a run, from the hosts or, if they have ended, from the run logs that are kept.

    Args:
        hosts: the hosts of the allocation.
        run: number of the run; None for the one that runs, or else the last.

    Raises:
        AllocationError: the hosts have ended and no run is kept, or did not start in time.
        UnreachableError: the hosts cannot be reached.
        RefusedError: there is no such run.
    """
    try:
        return Records.of(hosts, {"type": "follow", "run": run})
    except AllocationError as error:
        kept = _kept_logs(hosts, error)
        number = max(kept, default=0) if run is None else run
        if number not in kept:
            known = ", ".join(map(str, kept)) or "none"
            raise RefusedError(f"run {run if run is not None else ''} is not kept; those kept are: {known}") from None
        return KeptRecords(number, kept[number])


def ask_runs(hosts: Hosts) -> list[RunInfo]:
    """Return the runs that the hosts know, the ended ones first, then the current one and the queue.

    Raises:
        AllocationError: the hosts have ended, or did not start in time.
        UnreachableError: the hosts cannot be reached.
        RefusedError: the hosts refuse the request.
    """
    with hosts.open(RUNS) as link:
        return read_runs(link)


def read_runs(link: Connection, timeout: float = TIMEOUT) -> list[RunInfo]:
    """Read the answer to ``RUNS``; without its end if the connection breaks.

    Args:
        link: a connection whose greeting was ``RUNS``.
        timeout: seconds to wait for each part of the answer.

    Raises:
        TimeoutError: a part did not arrive in time.
        UnreachableError, RefusedError: as for ``ask_runs``.
    """
    found: list[RunInfo] = []
    while (answer := link.receive(timeout)) is not None:
        found += answer["runs"]
        if not answer["more"]:
            break
    return found


def list_runs(hosts: Hosts) -> list[RunInfo]:
    """Return the runs that the hosts know or, if they have ended, those that are kept; the oldest first.

    Raises:
        AllocationError: the hosts have ended and no run is kept, or did not start in time.
        UnreachableError, RefusedError: as for ``ask_runs``.
    """
    try:
        return ask_runs(hosts)
    except AllocationError as error:
        return [_info(number, path) for number, path in _kept_logs(hosts, error).items()]


def _kept_logs(hosts: Hosts, error: AllocationError) -> dict[int, Path]:
    """Return the paths of the run logs by number, in order; raise the error if the allocation has not ended."""
    if not hosts.end_reason:
        raise error
    folders = hosts.log_folders()
    if not folders:
        reason = f"{error}. Its runs were kept by its hosts alone; for its log: torchx log {hosts.handle}"
        raise AllocationError(reason) from None
    found: dict[int, Path] = {}
    for folder in folders:
        for name in os.listdir(folder) if folder.is_dir() else ():
            number, path = name.removeprefix("run_"), folder / name / "journal.jsonl"
            is_log = name != number and number.isascii() and number.isdigit() and path.is_file()
            if is_log and (int(number) not in found or _goes_on(found[int(number)], path)):
                found[int(number)] = path
    return dict(sorted(found.items()))


def _goes_on(log: Path, other: Path) -> bool:
    """Return whether the log of another host goes on with a run, because the leader that wrote ``log`` was lost."""
    return not _first_and_last(log)[1] and bool(_first_and_last(other)[0])


def _first_and_last(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record of a run, with which the log of a leader begins, and its result; each empty if it is absent."""
    first, last = {}, {}
    try:
        with open(safe_files.open_file(path), "rb") as file:
            first = _record(file.readline(_LAST_RECORD))
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_RECORD))
            last = _record(file.read().rstrip(b"\n").rpartition(b"\n")[2])
    except OSError:
        pass  # the file was removed, or is no file of this user: what is known is its number
    return (
        first if first.get("type") == "run" else {},
        last if last.get("type") == "result" else {},
    )


def _info(number: int, path: Path) -> RunInfo:
    first, last = _first_and_last(path)
    code = _field(last, "exit_code", 1)
    state = "stopped" if not last or _field(last, "stopped", False) else "failed" if code else "succeeded"
    started = _field(last, "started", 0.0)
    return RunInfo(
        run=number,
        state=state,
        command=_field(first, "command", ""),
        cwd=_field(first, "cwd", ""),
        code=_field(first, "code", ""),
        by=_field(first, "by", ""),
        submitted=_field(first, "submitted", 0.0),
        started=started,
        ended=started + _field(last, "seconds", 0.0) if started else 0.0,
        exit_code=code if last else None,
        reason=_field(last, "reason", "") if last else _NOT_ENDED,
    )


def _record(line: bytes) -> dict[str, Any]:
    """Parse a record; empty if the line is none."""
    try:
        record = safe_files.parse_json(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("type"), str) else {}


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "phase": {"text": str},
    "output": {"rank": int, "stream": str, "text": str},
    "exit": {"exit": dict},
    "attempts": {"count": int},
    "result": {
        "run": int,
        "exit_code": int,
        "reason": str,
        "stopped": bool,
        "cause": (int, type(None)),
        "seconds": (int, float),
        "code": str,
    },
}
"""The fields on which ``Collector`` relies, by the type of the record."""


def _is_sound(record: dict[str, Any]) -> bool:
    """Return whether a record has a type that ``Collector`` knows, and the fields of this type."""
    fields = _FIELDS.get(record.get("type", ""))
    if fields is None or not all(isinstance(record.get(name), kind) for name, kind in fields.items()):
        return False
    if record["type"] == "exit":
        with contextlib.suppress(TypeError):
            return isinstance(RankExit.from_json(record["exit"]).rank, int)
        return False
    return record["type"] != "output" or record["stream"] in ("stdout", "stderr")


def _field(record: dict[str, Any], name: str, default: T) -> T:
    """Return a field of a record; the default if it is absent or has another type."""
    value = record.get(name)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    return value if type(value) is type(default) else default
