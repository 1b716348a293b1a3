# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch exec``, ``follow``, ``ps`` and ``stop``: the runs of a live allocation."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections import Counter
from typing import Any, NoReturn, get_args

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.arguments import add_handle, add_hosts, add_role_and_address, hosts_of, unknown
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.output import add_json, print_json, print_record, print_table
from torchx_monarch.client.hosts import START_TIMEOUT, Hosts, say
from torchx_monarch.client.result import RunResult
from torchx_monarch.client.run import Collector, Records, collect_with_interrupts
from torchx_monarch.client.run_options import RunOptions, run_request, send_code
from torchx_monarch.client.workspace_sync import SyncMode, current_workspace
from torchx_monarch.exceptions import AllocationError, TorchXMonarchError
from torchx_monarch.insight.summary import Summary, local_path, show_restarts, show_shape
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.system.error_files import write_for_caller
from torchx_monarch.system.termination import closed_terminal_is_null, signal_of, termination
from torchx_monarch.system.untrusted_text import one_line

_USAGE = "usage: torchx monarch exec HANDLE [options] [-- torchrun --nproc-per-node 4 train.py ...]"

_PS_TIMEOUT = 15.0
"""Seconds for which ``ps`` waits for hosts that do not answer. Commands that use hosts wait longer for their start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser, required=True)
    _add_options(parser)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="torchrun, python or a script, with arguments"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_role_and_address(parser)
    parser.add_argument("--nproc", default="", help="ranks on each host (default: as the command says)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="variable for the ranks; without VALUE, as in the environment of this command",
    )
    parser.add_argument("--cwd", default="", help="folder that the hosts have, in which ranks start; no code is sent")
    parser.add_argument(
        "--workspace",
        help="folder with the code to send first (default: the current one, unless it is the home folder); '' sends "
        "nothing",
    )
    parser.add_argument(
        "--sync",
        choices=get_args(SyncMode),
        default="auto",
        help="whether each host gets a copy of the code; auto: unless all of them see the folder itself",
    )
    parser.add_argument("--timeout", type=float, help="seconds after which the hosts end the run")
    parser.add_argument("--queue", action="store_true", help="wait for the end of earlier runs (default: fail)")
    parser.add_argument("--detach", action="store_true", help="print the run's number, and do not wait for its end")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the phases of the run as well")
    parser.add_argument("--as-job", action="store_true", help=argparse.SUPPRESS)  # schedulers.run_on_allocation


def run(args: argparse.Namespace) -> None:
    try:
        _run(args)
    except TorchXMonarchError as error:
        if args.as_job:
            code = getattr(error, "exit_code", exit_codes.UNAVAILABLE)
            write_for_caller(HostResult(code, str(error), failed_at=time.time()).to_text())
        raise


def _run(args: argparse.Namespace) -> None:
    words = _words(args)
    env = {}
    for pair in args.env:
        name, equals, value = pair.partition("=")
        if not name or (not equals and name not in os.environ):
            reason = "give NAME=VALUE, or the NAME of a variable of this command"
            raise CommandError(f"--env {pair}: {reason}", exit_codes.USAGE)
        env[name] = value if equals else os.environ[name]
    workspace = current_workspace() if args.workspace is None and not args.cwd else args.workspace
    try:
        options = RunOptions(
            env=env,
            nproc=args.nproc or None,
            timeout=args.timeout,
            cwd=args.cwd or None,
            workspace=workspace or None,
            sync=args.sync,
            queue=args.queue,
        )
        request = dataclasses.replace(run_request(words or None, options), ends_with_client=args.as_job)
    except ValueError as error:
        raise CommandError(str(error), exit_codes.USAGE) from None
    hosts = hosts_of(args)
    if not args.detach:
        termination.install()
    hosts.wait(START_TIMEOUT, say)
    request = send_code(hosts, request, options)
    if not args.detach:
        termination.hold()  # a run cannot be stopped before its number is known: collect_with_interrupts releases them
    records = Records.request(hosts, request.to_message())
    if args.detach:
        print_accepted(args.handle, records.run) if args.json else print(records.run)
        records.close()
        return
    stream_and_exit(hosts, records, args.verbose, as_json=args.json, as_job=args.as_job)


def _words(args: argparse.Namespace) -> list[str]:
    """Return the words of the command to run.

    ``argparse.REMAINDER`` swallows options that follow the handle; this function parses them into ``args``.
    """
    typed: list[str] = args.command
    if not typed or not typed[0].startswith("-") or typed[0] == "-m":
        return typed
    parser = argparse.ArgumentParser(prog="torchx monarch exec HANDLE", add_help=False)
    _add_options(parser)
    add_json(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    _, unknown = parser.parse_known_args(typed, args)
    if unknown:
        raise CommandError(f"{unknown[0]} is no option here. {_USAGE}", exit_codes.USAGE)
    if args.module:
        return ["-m", *args.module]
    return args.program[1:] if args.program[:1] == ["--"] else list(args.program)


class CmdFollow:
    """Implement ``torchx monarch follow``: show the output of a run that another shell has begun."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_hosts(parser, required=True)
        parser.add_argument("run", type=int, nargs="?", help="its number (default: the one that runs, or the last)")

    def run(self, args: argparse.Namespace) -> None:
        """Show a run's output until its end; Ctrl-C leaves the run running."""
        hosts = hosts_of(args)
        records = Records.request(hosts, {"type": "follow", "run": args.run})
        stream_and_exit(hosts, records, verbose=False, ends=False, as_json=args.json)


class CmdPs:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_hosts(parser)

    def run(self, args: argparse.Namespace) -> None:
        runs, rows = hosts_of(args, start_timeout=_PS_TIMEOUT).runs(), []
        if args.json:
            print_json(runs)
            return
        for run in runs:
            code = "" if run["exit_code"] is None else str(run["exit_code"])
            seconds = (run["ended"] or time.time()) - run["started"] if run["started"] else 0.0
            texts = map(one_line, (run["by"], run["code"][:12], " ".join(run["command"].split())))
            rows.append([str(run["run"]), run["state"], code, f"{seconds:.1f} s", *texts])
        print_table(["RUN", "STATE", "CODE", "TIME", "BY", "SOURCE", "COMMAND"], rows)


class CmdStop:
    """Implement ``torchx monarch stop``: end the allocation, or a run."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_hosts(parser, required=True)
        parser.add_argument("--run", type=int, help="end the run of this number, and keep the hosts")

    def run(self, args: argparse.Namespace) -> None:
        hosts = hosts_of(args)
        if args.run is not None:
            answer = hosts.ask({"type": "end-run", "run": args.run, "kill": False})
            is_running = answer["state"] in ("queued", "running")
            done = f"stopping run {args.run}" if is_running else f"run {args.run} has ended"
        elif (status := hosts.ask_status()) is None:  # they may still be queued: the scheduler can cancel them
            if (found := hosts.read_app(brief=True)) is None:
                raise unknown(args.handle)
            hosts.release()
            state = found[1].state
            done = f"{args.handle} had ended before: {state.name}" if state.is_terminal else f"cancelled {args.handle}"
        elif status.message:
            raise AllocationError(f"{status.message}; to end it: torchx cancel {args.handle}")
        else:
            hosts.ask({"type": "stop"}, wait=False)
            done = f"stopped {args.handle}" + (f"/{args.role}" if args.role else "")
        if not args.json:
            say(done)
        else:
            stopped = "allocation" if args.run is None else "run"
            print_json({"handle": args.handle, "stopped": stopped, "run": args.run})


def stream_and_exit(
    hosts: Hosts, records: Records, verbose: bool, ends: bool = True, as_json: bool = False, as_job: bool = False
) -> NoReturn:
    """Show a run's output, and exit with its exit code; Ctrl-C stops the run if ``ends``, else this command alone.

    With ``as_job`` this is the process of a job, whose log and events are those of the run.
    """
    if as_json:
        print_accepted(hosts.handle, records.run)
        collector = Collector(
            lambda rank, stream, text: _print({"type": "output", "rank": rank, "stream": stream, "text": text}),
            lambda text: _print({"type": "phase", "text": text}),
        )
    else:
        events_path = os.environ["MONARCH_EVENTS"] if as_job else None
        collector = Collector("stream", say if verbose or as_job else None, events_path=events_path)
    try:
        result = collect_with_interrupts(hosts, records, collector) if ends else collector.collect(records)
    except KeyboardInterrupt as error:
        sys.exit(128 + signal_of(error))
    finally:
        records.close()
    if ends and result.exit_code != 0:
        write_for_caller(_error_file_of(result))
    if as_json:
        _print({"type": "result", "handle": hosts.handle, **_to_json(result)})
    elif not as_job:
        summary_of(hosts.handle, result, followed=not ends).write(sys.stderr)
    elif not result.ranks:  # nor has the run had an end that its log shows
        say(f"run {result.run}: {result.reason}")
    sys.exit(result.exit_code)


def print_accepted(handle: str, run: int) -> None:
    _print({"type": "accepted", "handle": handle, "run": run})


def _print(record: dict[str, Any]) -> None:
    with closed_terminal_is_null():
        print_record(record)


def _error_file_of(result: RunResult) -> str:
    cause = result.ranks.get(result.cause) if result.cause is not None else None
    whole = HostResult(result.exit_code, result.reason, failed_at=time.time())
    if cause is not None:
        whole = dataclasses.replace(whole, traceback=cause.traceback, replica=cause.replica, log=cause.log_path)
    return whole.to_text()


def _to_json(result: RunResult) -> dict[str, Any]:
    ranks = [dataclasses.asdict(rank) for rank in result.ranks.values()]
    values = dataclasses.asdict(dataclasses.replace(result, ranks={}))
    del values["output"]  # it was printed
    return {**values, "ranks": ranks}


def summary_of(handle: str, result: RunResult, followed: bool = False) -> Summary:
    """Return the summary of a run that has ended; another process has begun one that was ``followed``."""
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
