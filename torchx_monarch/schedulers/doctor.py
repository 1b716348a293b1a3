# SPDX-License-Identifier: BSD-3-Clause
"""Run the checks of ``torchx monarch doctor``: what is installed, the configuration, and schedulers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torchx.runner import config
from torchx.schedulers import get_scheduler_factories
from torchx.specs import CfgVal

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import BackendError
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
        "configuration": check_configuration,
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


def check_configuration() -> Iterable[CheckResult]:
    """Check the state directory, and that TorchX can read its configuration files."""
    yield check_state_dir(state_files.state_dir())
    try:
        files = _load_configuration("monarch_local", {})
    except Exception as error:
        yield check(".torchxconfig", "", fail=f"TorchX cannot read it: {_one_line(error)}; fix that line")
        return
    yield check(".torchxconfig", ", ".join(files) or "none")


def check_state_dir(path: str) -> CheckResult:
    """Check that the state directory, which need not exist, can be used and is closed to others."""
    folder = path
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.access(folder, os.W_OK | os.X_OK) or (folder == path and os.stat(folder).st_uid != os.geteuid()):
        advice = f"{folder} is no folder of yours that you can write to; name another in MONARCH_STATE_DIR"
        return check("state folder", path, fail=advice)
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    advice = f"others may enter it (mode {mode:04o}), and it holds credentials; run: chmod 700 {path}"
    return check("state folder", path, warn=advice if folder == path and mode & 0o077 else "")


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
        try:
            values: dict[str, CfgVal] = options.cfg_from_str(cfg)
            _load_configuration(name, values)
            resolved = options.resolve(values)
            scheduler.check_options(resolved)
        except BackendError:
            raise
        except Exception as error:
            reason = _one_line(error).partition(" Given: {")[0].rstrip(".")  # TorchX adds all options
            yield check("run options", cfg, fail=f"{reason}; `torchx runopts {name}` lists them")
            return
        yield check("run options", cfg or "defaults")
        yield from scheduler.checks(resolved)


def _usable(name: str, results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return whether a scheduler can be used: a warning if it cannot, nothing if it is not on our base."""
    wrong = next((result for result in results if result.level == "fail"), None)
    if wrong is None:
        return [check(name, ", ".join(result.value for result in results) or "can be used")]
    if wrong.what == "scheduler":
        return []
    return [check(name, wrong.value, warn=f"cannot be used: {wrong.advice}")]


def _load_configuration(scheduler: str, values: dict[str, CfgVal]) -> Sequence[str]:
    """Add a scheduler's options of TorchX's configuration files; return the files. (TorchX's ``apply`` logs each.)"""
    files: Sequence[str] = config.find_configs()
    for path in files:
        with open(path) as file:
            config.load(scheduler, file, values)
    return files


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
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
