# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch doctor``: check what is installed, and whether a scheduler can be used. It submits nothing."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from torchx_monarch.backends.core.backend import CheckResult
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.output import print_json
from torchx_monarch.schedulers.install_checks import REMEDY, installed_version
from torchx_monarch.schedulers.monarch import opened
from torchx_monarch.schedulers.run_options import with_stored
from torchx_monarch.system.untrusted_text import one_line

T = TypeVar("T")

_TIMEOUT = 20.0
"""Seconds for the checks of a scheduler: a cluster that cannot be reached answers late."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-s", "--scheduler", default="", help="check this scheduler, too, with its options")
    parser.add_argument("-cfg", "--scheduler-args", default="", metavar="CFG", help="run options, as for torchx run")


def run(args: argparse.Namespace) -> None:
    """Print a line for each check; exit with ``FAILED`` if one has failed."""
    if args.scheduler_args and not args.scheduler:
        raise UserError("-cfg needs -s SCHEDULER: the options are a scheduler's")
    results = list(check_installation())
    if args.scheduler:
        check = functools.partial(_check_scheduler, args.scheduler, args.scheduler_args)
        found, failure = run_groups({"": check}, _TIMEOUT)[""]
        results += [*found, CheckResult(args.scheduler, advice=failure)] if failure else found
    if args.json:
        print_json([{"level": result.level, **dataclasses.asdict(result)} for result in results])
    else:
        for result in results:
            print(one_line(result.line(), 500))
    if any(result.level == "fail" for result in results):
        sys.exit(exit_codes.FAILED)


def check_installation() -> Iterator[CheckResult]:
    """Check the packages that every scheduler needs; ``pip check`` compares the versions of all with what is needed."""
    yield CheckResult("python", f"{platform.python_version()} ({sys.executable})")
    for name in ("torchx-monarch", "torch", "torchx-nightly", "torchmonarch"):
        found = installed_version(name)
        yield CheckResult(name, found or "not installed", advice="" if found else f"run: pip install {name}")
    if stable := installed_version("torchx"):
        advice = "it owns the same files as torchx-nightly, and lacks what torchx-monarch needs"
        yield CheckResult("torchx", stable, advice=f"{advice}; {REMEDY}")


def _check_scheduler(name: str, cfg: str) -> Iterator[CheckResult]:
    """Check that jobs can be submitted to a scheduler with run options, and those of ``.torchxconfig``."""
    with opened(name) as scheduler:
        yield CheckResult("scheduler", name)
        options = scheduler.run_opts()
        yield from scheduler.checks(options.resolve(with_stored(options.cfg_from_str(cfg), name)))


def run_groups(groups: Mapping[str, Callable[[], Iterable[T]]], timeout: float) -> dict[str, tuple[list[T], str]]:
    """Run functions at the same time; return what each has returned, and why not all of it; empty if all.

    A function that does not end within ``timeout`` seconds is not waited for, also at the end of this process.
    """
    found: dict[str, list[T]] = {name: [] for name in groups}
    failures: dict[str, str] = {}

    def run(name: str) -> None:
        try:
            for result in groups[name]():
                found[name].append(result)
        except (Exception, SystemExit) as error:
            text = str(error).partition(" Given: {")[0]  # TorchX adds all options
            failures[name] = " ".join(text.split()).rstrip(".") or type(error).__name__

    # Not a pool: the interpreter would wait for its threads at its end, and a network file system may hang for minutes.
    threads = {name: threading.Thread(target=run, args=[name], daemon=True) for name in groups}
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + timeout
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            failures[name] = f"no answer in {timeout:g} s: check the network, the daemon and the disk"
    return {name: ([*found[name]], failures.get(name, "")) for name in groups}
