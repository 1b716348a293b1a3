# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check Slurm's commands, controller and partition for ``torchx monarch doctor``."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator

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
    told = native.run(["scontrol", "ping"], _TIMEOUT)
    up = told.returncode == 0 and " UP" in told.stdout.upper()
    answer = (told.stdout + told.stderr).strip().replace("\n", ", ")
    yield check(
        "slurmctld",
        ": ".join(filter(None, (version, answer))),
        fail="" if up else "start it, or see SLURM_CONF and the network",
    )
    if not up or options is None:
        return
    yield _check_partition(options.partition)
    if options.container in _IN_HELP:
        yield check("containers", options.container, fail=_lack(options.container))
    folder = options.job_dir or state_files.state_dir()
    while not os.path.lexists(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    writable = os.access(folder, os.W_OK | os.X_OK)
    advice = "you cannot write there; name a folder that you can write and all nodes see in -cfg job_dir"
    yield check("folder of jobs", options.job_dir or state_files.state_dir(), fail="" if writable else advice)


_IN_HELP = {"pyxis": "--container-image", "oci": "--container"}
"""The option of srun that containers of a kind need."""


def check_containers(kinds: Iterable[str]) -> None:
    """Check that the cluster can run containers of these kinds (``container.KINDS``).

    Raises:
        SlurmError: it cannot.
    """
    for kind in sorted(kinds):
        if reason := _lack(kind):
            raise SlurmError(f"this cluster cannot run -cfg container={kind}: {reason}")


def _lack(kind: str) -> str:
    """Return what the cluster lacks for containers of a kind; empty if nothing is known to be missing."""
    option, version = _IN_HELP[kind], native.run(["sinfo", "--version"]).stdout.strip()
    told = native.run(["srun", "--help"]).stdout
    if not re.search(rf"{option}(?![\w-])", told):
        if kind == "oci":
            return f"{version} has no containers, which are in Slurm 21.08 and later"
        return (
            "its srun has no option --container-image: pyxis is not installed (plugstack.conf). See -cfg container=oci"
        )
    if kind == "oci":
        found = re.search(r"^SLURM_CONF\s*=\s*(\S+)", native.run(["scontrol", "show", "config"]).stdout, re.MULTILINE)
        conf = found[1] if found else ""
        oci = os.path.join(os.path.dirname(conf), "oci.conf")
        # Commands without configuration files of their own leave the check to the nodes.
        if os.path.isfile(conf) and not os.path.exists(oci):
            return f"there is no {oci}, which names the runtime of containers, such as crun"
    return ""


def _check_partition(partition: str | None) -> CheckResult:
    """Check that a partition accepts jobs.

    Args:
        partition: its name; None for Slurm's default.
    """
    which = ["--partition", partition] if partition else []
    told = native.run(["sinfo", "--noheader", "--format=%P %a %D", *which], _TIMEOUT)
    if told.returncode:
        return check("partition", partition or "", fail=f"sinfo refuses: {told.stderr.strip()}")
    rows = [fields for fields in map(str.split, told.stdout.splitlines()) if len(fields) == 3]
    if not partition:
        rows = [fields for fields in rows if fields[0].endswith("*")]
    if not rows:
        known = "there is no such partition" if partition else "Slurm has no default partition"
        return check("partition", partition or "", fail=f"{known}; `sinfo` lists them, -cfg partition=NAME takes one")
    name, state, nodes = rows[0][0].rstrip("*"), rows[0][1], sum(int(row[2]) for row in rows if row[2].isdigit())
    advice = "" if state == "up" else "it starts no jobs; name another in -cfg partition"
    return check("partition", f"{name}, {state}, {nodes} nodes", fail=advice)
