# SPDX-License-Identifier: BSD-3-Clause
"""Run the checks of ``torchx monarch doctor``: what is installed, and schedulers."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torchx.runner import config
from torchx.specs import CfgVal

from torchx_monarch.model.check_result import CheckResult
from torchx_monarch.schedulers.install_checks import check_installation
from torchx_monarch.schedulers.monarch import registered_scheduler

T = TypeVar("T")

_TIMEOUT = 20.0
"""Seconds for the checks of a scheduler: a cluster that cannot be reached answers late."""


def diagnose(scheduler: str, cfg: str) -> list[CheckResult]:
    """Run all checks and return their results. Submit nothing.

    Args:
        scheduler: name of the scheduler to check with its run options; empty to check the installation alone.
        cfg: run options of ``scheduler``, as for ``torchx run -cfg``.
    """
    found = list(check_installation())
    if scheduler:
        groups = {scheduler: functools.partial(check_scheduler, scheduler, cfg)}
        results, failure = run_groups(groups, _TIMEOUT)[scheduler]
        found += [*results, CheckResult(scheduler, advice=failure)] if failure else results
    return found


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


def check_scheduler(name: str, cfg: str) -> Iterable[CheckResult]:
    """Check that jobs can be submitted to a scheduler with run options, and those of ``.torchxconfig``."""
    scheduler = registered_scheduler(name)
    with contextlib.closing(scheduler.inner):
        yield CheckResult("scheduler", name)
        options = scheduler.run_opts()
        values: dict[str, CfgVal] = options.cfg_from_str(cfg)
        for path in config.find_configs():  # TorchX's ``apply`` logs each
            with open(path) as file:
                config.load(name, file, values)
        resolved = options.resolve(values)
        scheduler.check_options(resolved)
        yield from scheduler.checks(resolved)
