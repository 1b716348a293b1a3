# SPDX-License-Identifier: BSD-3-Clause
"""Run the checks of ``torchx monarch doctor``: what is installed, and schedulers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torchx.runner import config
from torchx.schedulers import get_scheduler_factories
from torchx.specs import CfgVal

from torchx_monarch.model.check_result import CheckResult, check
from torchx_monarch.model.spelling import did_you_mean
from torchx_monarch.schedulers import EXTRAS, registered
from torchx_monarch.schedulers.install_checks import check_extra, check_installation
from torchx_monarch.schedulers.monarch import MonarchScheduler

T = TypeVar("T")

_TIMEOUT = 20.0
"""Seconds for the checks of a group, such as a scheduler's: a cluster that cannot be reached answers late."""


def diagnose(scheduler: str, cfg: str) -> list[CheckResult]:
    """Run all checks and return their results. Submit nothing.

    Args:
        scheduler: name of the scheduler to check with its run options; empty to see which schedulers can be used.
        cfg: run options of ``scheduler``, as for ``torchx run -cfg``.
    """
    names = [scheduler] if scheduler else registered()
    groups: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "installation": check_installation,
        **{name: functools.partial(check_scheduler, name, cfg if scheduler else None) for name in names},
    }
    found = {}
    for name, (results, failure) in run_groups(groups, _TIMEOUT).items():
        found[name] = [*results, *([check(name, "", fail=failure)] if failure else [])]
    if not scheduler:
        found.update({name: _usable(name, found[name]) for name in names})
    return list(itertools.chain.from_iterable(found.values()))


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
            failures[name] = _one_line(error)

    # Not a pool: the interpreter would wait for its threads at its end, and a network file system may hang for minutes.
    threads = {name: threading.Thread(target=run, args=[name], daemon=True) for name in groups}
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + timeout
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            failures[name] = f"no answer in {timeout:g} s: see the network, the daemon, the disk"
    return {name: ([*found[name]], failures.get(name, "")) for name in groups}


def check_scheduler(name: str, cfg: str | None) -> Iterable[CheckResult]:
    """Check that jobs can be submitted to a scheduler with run options.

    Args:
        cfg: run options, as for ``torchx run -cfg``; those of ``.torchxconfig`` are added. None to check only that the
            place where it runs apps can be reached.
    """
    scheduler, result = _create(name)
    if scheduler is None or cfg is not None:
        yield result
    if scheduler is None:
        return
    with contextlib.closing(scheduler.inner):
        if cfg is None:
            yield from scheduler.checks(None)
            return
        options = scheduler.run_opts()
        values: dict[str, CfgVal] = options.cfg_from_str(cfg)
        for path in config.find_configs():  # TorchX's ``apply`` logs each
            with open(path) as file:
                config.load(name, file, values)
        resolved = options.resolve(values)
        scheduler.check_options(resolved)
        yield from scheduler.checks(resolved)


def _usable(name: str, results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return whether a scheduler can be used: a warning if it cannot, nothing if it is not on our base."""
    wrong = next((result for result in results if result.level == "fail"), None)
    if wrong is None:
        return [check(name, ", ".join(result.value for result in results) or "can be used")]
    if wrong.what == "scheduler":
        return []
    return [CheckResult("warn", name, wrong.value, f"cannot be used: {wrong.advice}")]


def _create(name: str) -> tuple[MonarchScheduler | None, CheckResult]:
    factories = get_scheduler_factories()
    ours = ", ".join(registered())
    if name not in factories:
        hint = did_you_mean(name, list(factories))
        advice = f"there is none of this name.{hint} Those of torchx-monarch are {ours}"
        return None, check("scheduler", name, fail=advice)
    if name in EXTRAS and (missing := check_extra(EXTRAS[name])):
        return None, missing[0]
    scheduler = factories[name]("torchx")
    if not isinstance(scheduler, MonarchScheduler):
        advice = f"it is of another package, which has no checks; those of torchx-monarch are {ours}"
        return None, check("scheduler", name, fail=advice)
    return scheduler, check("scheduler", name)


def _one_line(error: BaseException) -> str:
    text = str(error).partition(" Given: {")[0]  # TorchX adds all options
    return " ".join(text.split()).rstrip(".") or type(error).__name__
