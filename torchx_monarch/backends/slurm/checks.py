# SPDX-License-Identifier: BSD-3-Clause
"""Check Slurm's commands, controller and partition for ``torchx monarch doctor``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.slurm import native
from torchx_monarch.backends.slurm.native import SlurmError
from torchx_monarch.backends.slurm.options import SlurmOpts
from torchx_monarch.model.check_result import CheckResult, check

_COMMANDS = ("sbatch", "scontrol", "squeue", "scancel", "sinfo")

_TIMEOUT = 5.0


def check_slurm(options: SlurmOpts | None) -> Iterator[CheckResult]:
    """Check that jobs can be submitted with run options.

    Args:
        options: the run options; None to check only that Slurm answers.

    Raises:
        SlurmError: a command does not end in time or cannot be run.
    """
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    advice = f"{', '.join(missing)} not on the PATH; install Slurm's commands (Debian: slurm-client, Red Hat: slurm)"
    yield check("Slurm's commands", shutil.which("sbatch") or "", fail=advice if missing else "")
    if missing:
        return
    version = native.run(["sinfo", "--version"], _TIMEOUT).stdout.strip()
    ping = native.run(["scontrol", "ping"], _TIMEOUT)
    up = ping.returncode == 0 and " UP" in ping.stdout.upper()
    answer = (ping.stdout + ping.stderr).strip().replace("\n", ", ")
    yield check(
        "slurmctld",
        ": ".join(filter(None, (version, answer))),
        fail="" if up else "start it, or see SLURM_CONF and the network",
    )
    if not up or options is None:
        return
    yield _check_partition(options.partition)
    if options.container:
        yield check("containers", options.container, fail="" if _has_pyxis() else _NO_PYXIS)
    folder = options.job_dir or state_files.state_dir()
    while not os.path.lexists(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    writable = os.access(folder, os.W_OK | os.X_OK)
    advice = "you cannot write there; name a folder that you can write and all nodes see in -cfg job_dir"
    yield check("folder of jobs", options.job_dir or state_files.state_dir(), fail="" if writable else advice)


_NO_PYXIS = "its srun has no option --container-image: pyxis is not installed (plugstack.conf)"


def check_pyxis() -> None:
    """Check that the cluster can run containers.

    Raises:
        SlurmError: it cannot.
    """
    if not _has_pyxis():
        raise SlurmError(f"this cluster cannot run -cfg container=pyxis: {_NO_PYXIS}")


def _has_pyxis() -> bool:
    return "--container-image" in native.run(["srun", "--help"]).stdout


def _check_partition(partition: str | None) -> CheckResult:
    """Check that a partition accepts jobs.

    Args:
        partition: its name; None for Slurm's default.
    """
    which = ["--partition", partition] if partition else []
    sinfo = native.run(["sinfo", "--noheader", "--format=%P %a %D", *which], _TIMEOUT)
    if sinfo.returncode:
        return check("partition", partition or "", fail=f"sinfo refuses: {sinfo.stderr.strip()}")
    rows = [fields for fields in map(str.split, sinfo.stdout.splitlines()) if len(fields) == 3]
    if not partition:
        rows = [fields for fields in rows if fields[0].endswith("*")]
    if not rows:
        reason = "there is no such partition" if partition else "Slurm has no default partition"
        return check("partition", partition or "", fail=f"{reason}; `sinfo` lists them, -cfg partition=NAME takes one")
    name, state, nodes = rows[0][0].rstrip("*"), rows[0][1], sum(int(row[2]) for row in rows if row[2].isdigit())
    advice = "" if state == "up" else "it starts no jobs; name another in -cfg partition"
    return check("partition", f"{name}, {state}, {nodes} nodes", fail=advice)
