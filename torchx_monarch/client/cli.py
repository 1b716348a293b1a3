# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``torchx monarch`` command: run commands on the hosts of a live allocation from a shell."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import NoReturn, get_args

from torchx.cli.cmd_base import SubCommand
from torchx.specs import MalformedAppHandleException
from torchx.specs.api import UnknownSchedulerException

from torchx_monarch.backends.core import state_files
from torchx_monarch.client.allocations import AllocationInfo, list_allocations
from torchx_monarch.client.connection import ask
from torchx_monarch.client.hosts import START_TIMEOUT, Hosts, say
from torchx_monarch.client.job import SPMDJob
from torchx_monarch.client.run import Collector, Records, collect_with_interrupts
from torchx_monarch.client.run_message import run_message
from torchx_monarch.client.run_options import RunOptions
from torchx_monarch.client.workspace_sync import SyncMode, current_workspace
from torchx_monarch.exceptions import AllocationError, CodeError, RefusedError, UnreachableError
from torchx_monarch.system.untrusted_text import one_line

_NO_ANSWER = 69
"""Exit code when the hosts cannot be reached or refuse the request: EX_UNAVAILABLE of ``sysexits.h``."""

_USAGE = "usage: torchx monarch exec HANDLE [options] [-- torchrun --nproc-per-node 4 train.py ...]"


class CmdMonarch(SubCommand):  # type: ignore[misc]
    """Implement ``torchx monarch`` with its sub-commands ``exec``, ``follow``, ``ps``, ``stop`` and ``preload``."""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        """Define the arguments of ``torchx monarch``."""
        commands = subparser.add_subparsers(title="commands", required=True, metavar="COMMAND")
        one = commands.add_parser("exec", help="run a command on an allocation's hosts")
        one.add_argument("handle", help="as torchx run printed it")
        _exec_options(one)
        one.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="as one would type it")
        one.set_defaults(monarch=_exec)
        one = commands.add_parser("follow", help="the output of a run that was begun elsewhere, and its exit code")
        _allocation(one)
        one.add_argument("run", type=int, nargs="?", help="its number (default: the one that runs, or the last)")
        one.set_defaults(monarch=_follow, verbose=False)
        one = commands.add_parser("ps", help="allocations, or the runs of one")
        _allocation(one, optional=True)
        one.set_defaults(monarch=_ps)
        one = commands.add_parser("stop", help="give an allocation's hosts back, or end one run")
        _allocation(one)
        one.add_argument(
            "--run", type=int, nargs="?", const=0, help="end this run, or the one that runs; keep the hosts"
        )
        one.set_defaults(monarch=_stop)
        one = commands.add_parser("preload", help="what -cfg preload=auto has learned of the jobs of this machine")
        one.add_argument("app", nargs="?", help="name of the jobs, without their random suffix (default: all)")
        one.add_argument("--json", action="store_true", help="print all names of modules, as JSON")
        one.add_argument("--clear", action="store_true", help="forget it")
        one.set_defaults(monarch=_preload)

    def run(self, args: argparse.Namespace) -> None:
        """Execute the sub-command; exit with its exit code, or with an error message if the hosts are unreachable."""
        try:
            args.monarch(args)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:  # 141 is the shell's code for SIGPIPE; the run continues on the hosts
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(141)
        except (UnreachableError, RefusedError, AllocationError, CodeError) as error:
            say(str(error))
            sys.exit(_NO_ANSWER)
        except (MalformedAppHandleException, UnknownSchedulerException) as error:
            say(f"{error}. `torchx monarch ps` lists what there is.")
            sys.exit(os.EX_USAGE)


def _exec_options(parser: argparse.ArgumentParser) -> None:
    _where(parser)
    parser.add_argument("--nproc", default="", help="processes on each host, where not as the command says")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable for the ranks")
    parser.add_argument("--cwd", default="", help="folder on the hosts that the ranks start in, as it is there")
    parser.add_argument(
        "--workspace",
        help="folder with the code, which the hosts are brought first (default: the current one, unless it is the "
        "home folder); '' for what is there",
    )
    parser.add_argument(
        "--sync",
        choices=get_args(SyncMode),
        default="auto",
        help="whether the hosts get a copy of it; auto: unless they see the folder itself",
    )
    parser.add_argument("--timeout", type=float, help="seconds after which the hosts end the run")
    parser.add_argument("--queue", action="store_true", help="wait for runs that have not ended, and do not fail")
    parser.add_argument("--detach", action="store_true", help="print the run's number, and do not wait for its end")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the phases of the run as well")


def _allocation(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument("handle", nargs="?" if optional else None, help="as torchx run printed it")
    _where(parser)


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", default="", help="which of the app's roles (default: the first)")
    parser.add_argument(
        "--address", default="", help="HOST:PORT where replica 0 is reached from here: the near end of a tunnel"
    )


def _hosts(args: argparse.Namespace) -> Hosts:
    return Hosts(args.handle, args.role, args.address)


def _job(args: argparse.Namespace) -> SPMDJob:
    return SPMDJob(args.handle, args.role, args.address)


def _exec(args: argparse.Namespace) -> None:
    words = _words(args)
    env = {}
    for pair in args.env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            say(f"--env {pair}: give NAME=VALUE")
            sys.exit(os.EX_USAGE)
        env[name] = value
    workspace = current_workspace() if args.workspace is None and not args.cwd else args.workspace
    options = RunOptions(
        env=env,
        nproc=args.nproc or None,
        timeout=args.timeout,
        cwd=args.cwd or None,
        workspace=workspace or None,
        sync=args.sync,
        queue=args.queue,
    )
    hosts = _hosts(args)
    hosts.wait(START_TIMEOUT, say)
    records = Records.of(hosts, run_message(hosts, words or None, options))
    if args.detach:
        print(records.run)
        records.close()
        return
    _stream_and_exit(hosts, records, args.verbose)


def _words(args: argparse.Namespace) -> list[str]:
    """Return the words of the command to run.

    ``argparse.REMAINDER`` swallows options that follow the handle; this function parses them into ``args``.
    """
    typed: list[str] = args.command
    if not typed or not typed[0].startswith("-") or typed[0] == "-m":
        return typed
    end = typed.index("--") if "--" in typed else len(typed)
    parser = argparse.ArgumentParser(add_help=False)
    _exec_options(parser)
    _, unknown = parser.parse_known_args(typed[:end], args)
    if unknown:
        say(f"{unknown[0]} is no option here. {_USAGE}")
        sys.exit(os.EX_USAGE)
    return typed[end + 1 :]


def _follow(args: argparse.Namespace) -> None:
    hosts = _hosts(args)
    _stream_and_exit(hosts, Records.of(hosts, {"type": "follow", "run": args.run}), args.verbose, ends=False)


def _stream_and_exit(hosts: Hosts, records: Records, verbose: bool, ends: bool = True) -> NoReturn:
    """Show a run's output, and exit with its exit code.

    Args:
        hosts: the hosts of the allocation.
        records: the records of the run.
        verbose: whether to show the phases of the run as well.
        ends: whether Ctrl-C stops the run; otherwise Ctrl-C only ends this command.
    """
    collector = Collector("stream", say if verbose else None)
    try:
        result = collect_with_interrupts(hosts, records, collector) if ends else collector.collect(records)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        records.close()
    if result.exit_code != 0 and not verbose:
        cause = result.ranks.get(result.cause) if result.cause is not None else None
        if cause is not None and cause.traceback:
            say(f"traceback of rank {cause.rank}:\n{cause.traceback.rstrip()}")
        if cause is not None and cause.log_path:
            say(f"log of rank {cause.rank}: {cause.log_path}")
        say(f"run {result.run} {'STOPPED' if result.stopped else 'FAILED'}: {result.reason}")
    sys.exit(result.exit_code)


def _ps(args: argparse.Namespace) -> None:
    if args.handle is None:
        _table(["HANDLE", "ROLE", "HOSTS", "STATE", "RUNS", "IDLE"], [_row(found) for found in list_allocations()])
        return
    rows = []
    for run in _job(args).runs():
        code = "" if run["exit_code"] is None else str(run["exit_code"])
        seconds = (run["ended"] or time.time()) - run["started"] if run["started"] else 0.0
        command = " ".join(run["command"].split())
        rows.append([str(run["run"]), run["state"], code, f"{seconds:.1f} s", run["by"], run["code"][:12], command])
    _table(["RUN", "STATE", "CODE", "TIME", "BY", "SOURCE", "COMMAND"], rows)


def _row(found: AllocationInfo) -> list[str]:
    live = found.live
    state = f"run {live['run']}" if live["run"] else "ready" if live["ready"] else "starting"
    limit = f" of {live['idle_timeout']:.0f}" if live["idle_timeout"] else ""
    return [found.handle, live["role"], str(found.hosts), state, str(live["runs"]), f"{live['idle']:.0f}{limit} s"]


def _table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _stop(args: argparse.Namespace) -> None:
    if args.run is not None:
        _job(args).cancel_run(args.run or None)
        return
    hosts = _hosts(args)
    try:
        ask(hosts.target, {"type": "stop"})
    except UnreachableError:
        hosts.release()  # unreachable hosts may still be queued: the scheduler can cancel them


def _preload(args: argparse.Namespace) -> None:
    from torchx_monarch.model.learned_modules import LearnedFile  # `torchx --help` imports this file

    folder = os.path.join(state_files.state_dir(), "learned")
    found = [one for one in LearnedFile.all_in(folder) if args.app in (None, one.app)]
    if args.clear:
        for one in found:
            try:
                one.remove()
            except OSError as error:
                say(f"cannot remove {one.path}: {error.strerror}")
                sys.exit(1)
        return
    modules = [(one, one.read()) for one in found]
    if args.json:
        fields = [{"app": one.app, "role": one.role, "program": one.program, **vars(each)} for one, each in modules]
        print(json.dumps(fields, indent=1))
        return
    rows = []
    for one, each in modules:
        packages = ", ".join(sorted({name.partition(".")[0] for name in each.names}))
        rows.append([*map(one_line, (one.app, one.role, one.program)), str(len(each.names)), packages])
    _table(["APP", "ROLE", "PROGRAM", "MODULES", "OF"], rows)
    for one, each in modules:
        for name, why in each.dropped.items():
            print(f"{one_line(one.app)}: {name} is not imported ahead: {one_line(why)}")
