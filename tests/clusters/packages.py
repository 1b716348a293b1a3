# SPDX-License-Identifier: BSD-3-Clause
"""Debian's packages that clusters of the tests consist of, installed where they are missing and may be."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.waits import WITHIN, until

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""PATH, and where Debian has what only root uses, which not every PATH names."""

_POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian asks it whether a package that is being installed may start its services."""


def unavailable(what: str, namespaces: Sequence[str], programs: Sequence[str], packages: Sequence[str]) -> str:
    """Return why this machine cannot have a cluster, after an attempt to install the packages; empty when it can.

    Args:
        what: the cluster, for the message.
        namespaces: options of ``unshare`` for those that it has.
        programs: of which it consists.
        packages: of Debian, with the programs.
    """
    if os.geteuid() != 0:
        return f"{what} needs root"
    probe = subprocess.run(["unshare", *namespaces, "true"], capture_output=True, text=True, timeout=WITHIN)
    if probe.returncode:
        return probe.stderr.strip()
    absent = missing(programs, packages)
    return f"not installed, and cannot be: {', '.join(absent)} (Debian: {' '.join(packages)})" if absent else ""


def skip_for(reason: str) -> None:
    """Skip a test for a reason, if there is one; in CI it is a mistake, and the test fails."""
    if reason:
        (pytest.fail if "CI" in os.environ else pytest.skip)(reason)


def missing(programs: Sequence[str], packages: Sequence[str]) -> list[str]:
    """The programs that are not there, after an attempt to install the packages; none of whose services is started."""
    if not _absent(programs) or shutil.which("apt-get") is None:
        return _absent(programs)
    # Clusters come up side by side, and apt does not wait for another apt's lists.
    lock = os.open(_POLICY.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _absent(programs):
            _install(packages)
    finally:
        os.close(lock)
    return _absent(programs)


def _absent(programs: Sequence[str]) -> list[str]:
    return [name for name in programs if shutil.which(name, path=PATH) is None]


def _install(packages: Sequence[str]) -> None:
    forbids = not _POLICY.exists()
    if forbids:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
    env = {**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        for words in (["update"], ["install", "--no-install-recommends", *packages]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([*apt, *words], env=env, capture_output=True, timeout=300, check=False)
    finally:
        if forbids:
            _POLICY.unlink()


def until_ended(folder: str) -> None:
    """Wait until no command line has a daemon's folder: what was killed writes there until the kernel has ended it."""
    processes = functools.partial(psutil.process_iter, ["cmdline"])
    until(lambda: not any(folder in str(process.info["cmdline"]) for process in processes()), f"processes of {folder}")
