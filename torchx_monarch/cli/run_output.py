# SPDX-License-Identifier: BSD-3-Clause
"""Show the output of a run on a live allocation and exit with its exit code."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from typing import Any, NoReturn

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.output import print_record
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.client.result import RunResult
from torchx_monarch.client.run import Collector, RunRecords, collect_with_interrupts
from torchx_monarch.insight.summary import Summary, local_path, show_restarts, show_shape
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.system.error_files import write_for_caller
from torchx_monarch.system.termination import closed_terminal_is_null


def stream_and_exit(
    hosts: Hosts, records: RunRecords, verbose: bool, ends: bool = True, as_json: bool = False
) -> NoReturn:
    """Show a run's output, and exit with its exit code.

    Args:
        verbose: whether to show the phases of the run as well.
        ends: whether Ctrl-C stops the run; otherwise Ctrl-C only ends this command.
        as_json: whether to print the records of the run, one JSON object a line, instead of the output.
    """
    if as_json:
        print_accepted(hosts.handle, records.run)
        collector = Collector(_print_output, lambda text: _print({"type": "phase", "text": text}))
    else:
        collector = Collector("stream", say if verbose else None)
    try:
        result = collect_with_interrupts(hosts, records, collector) if ends else collector.collect(records)
    except KeyboardInterrupt as error:
        sys.exit(exit_codes.interrupted(error))
    finally:
        records.close()
    if ends and result.exit_code != 0:
        write_for_caller(_error_file_of(result))
    if as_json:
        _print({"type": "result", "handle": hosts.handle, **_to_json(result)})
    else:
        summary_of(hosts.handle, result, followed=not ends).write(sys.stderr)
    sys.exit(result.exit_code)


def print_accepted(handle: str, run: int) -> None:
    """Print the first JSON record of a run."""
    _print({"type": "accepted", "handle": handle, "run": run})


def _print_output(rank: int, stream: str, text: str) -> None:
    _print({"type": "output", "rank": rank, "stream": stream, "text": text})


def _print(record: dict[str, Any]) -> None:
    with closed_terminal_is_null():
        print_record(record)


def _error_file_of(result: RunResult) -> str:
    """Return the content of an error file with the root cause of a run that has failed."""
    cause = result.ranks.get(result.cause) if result.cause is not None else None
    whole = HostResult(result.exit_code, result.reason, failed_at=time.time())
    if cause is not None:
        whole = dataclasses.replace(whole, traceback=cause.traceback, replica=cause.replica, log=cause.log_path)
    return whole.to_text()


def _to_json(result: RunResult) -> dict[str, Any]:
    """Return the result of a run as JSON values, with the ranks as a list."""
    ranks = [dataclasses.asdict(rank) for rank in result.ranks.values()]
    values = dataclasses.asdict(dataclasses.replace(result, ranks={}))
    del values["output"]  # it was printed
    return {**values, "ranks": ranks}


def summary_of(handle: str, result: RunResult, followed: bool = False) -> Summary:
    """Return the summary of a run that has ended.

    Args:
        followed: whether another process has begun the run.
    """
    cause = result.ranks.get(result.cause) if result.cause is not None else None
    log = cause.log_path if cause is not None else ""
    if cause is not None and log and not local_path(log):
        log = f"{log} on {cause.hostname}"
    counts = Counter(rank.replica for rank in result.ranks.values())
    per_host = set(counts.values())
    shape = show_shape(len(counts), per_host.pop() if len(per_host) == 1 else None)
    failed = result.exit_code != 0
    command = f"ps {handle}" if followed else f"follow {handle} {result.run}" if failed else f"stop {handle}"
    return Summary(
        "STOPPED" if result.stopped else "FAILED" if failed else "SUCCEEDED",
        f"run {result.run} on {handle}",
        result.seconds,
        cause=result.reason if failed else "",
        traceback=cause.traceback if cause is not None else "",
        log=log,
        ran=f"{shape}, {show_restarts(result.attempts - 1)}" if counts else "",
        next=(f"torchx monarch {command}",),
    )
