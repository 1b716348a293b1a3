# SPDX-License-Identifier: BSD-3-Clause
"""Submit an app or a command as a live allocation."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.client.hosts import START_TIMEOUT, say
from torchx_monarch.client.run_options import RunOptions, split_command
from torchx_monarch.client.workspace_sync import SyncMode, current_workspace
from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDef

    from torchx_monarch.client.job import SPMDJob


def serve(
    appdef: AppDef | str | Sequence[str],
    scheduler: str = "monarch_local",
    scheduler_cfg: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    idle_timeout: float = IDLE_TIMEOUT,
    workspace: str | None = None,
    sync: SyncMode = "auto",
    role: str = "",
    start_timeout: float | None = START_TIMEOUT,
    runner: Runner | None = None,
) -> SPMDJob:
    """Request hosts that wait for runs, from any ``monarch_*`` scheduler.

    Prints the handle on stderr when the job is submitted, and does not wait for the hosts to start::

        job = serve("torchrun --nnodes 2 --nproc-per-node 4 train.py", scheduler="monarch_slurm")
        job.run_spmd()
        job.run_spmd(["train.py", "--lr", "0.2"])
        job.release()

    The parameters of ``monarch.job.spmd.serve`` have the same meaning here, and a cached ``.monarch/job_state.pkl`` of
    an earlier job is removed, with a warning. The app itself is not changed: the function submits a copy whose roles
    wait for runs instead of executing their commands. The command of a role becomes the default command of its runs.

    Args:
        appdef: an AppDef; or a torchrun or Python command, as a list of words or as a string that is split as a shell
            splits it. A torchrun command gets as many hosts as the maximum of its ``--nnodes``, a Python command one.
        scheduler: name of a ``monarch_*`` scheduler, such as ``monarch_local`` or ``monarch_slurm``.
        scheduler_cfg: run options of the scheduler; None for its defaults.
        name: name of the app if ``appdef`` is a command; empty for ``spmd-job``.
        idle_timeout: seconds without a run after which the hosts end; 0 for never.
        workspace: folder with the code. The hosts start with it, as with ``torchx run --workspace``, and each run first
            sends its changes. None for the current folder if ``appdef`` is a command (then only runs send it; ``/`` and
            the home folder are never sent), and for no workspace if ``appdef`` is an AppDef.
        sync: when the hosts get a copy of the workspace; see ``SyncMode``.
        role: name of the role whose hosts execute the runs; empty for the first role.
        start_timeout: seconds that a run, or any other request, waits for hosts that have not started; None for no
            limit.
        runner: the TorchX runner; None to create one.

    Returns:
        The allocation, with which runs are started.

    Raises:
        ValueError: an argument has an invalid value: ``appdef`` is not a torchrun or Python command, or an app without
            such a command; ``scheduler`` is not one of this package; there is no such ``role`` or ``workspace``.
        TypeError: ``appdef`` is neither an AppDef, a string nor a list, or ``scheduler_cfg`` no dict.
        UserError: the scheduler cannot run the app.
        BackendError: the scheduler cannot be reached, fails, or does not accept the app.
        torchx.specs.InvalidRunConfigException: a run option is unknown or has an invalid value.
    """
    from torchx_monarch.client.attached_job import CACHE, discard_cached_job  # imports Monarch
    from torchx_monarch.client.job import SPMDJob

    RunOptions(workspace=workspace, sync=sync)  # checks them before hosts are taken
    is_command = isinstance(appdef, (str, list, tuple))
    code = workspace or (current_workspace() if is_command else None)
    if name and not is_command:
        raise ValueError(f"name={name!r} is for a command; that of an AppDef is its own")
    app = command_app(appdef, name) if is_command else appdef
    if not hasattr(app, "roles"):
        raise TypeError(
            f"appdef={appdef!r}: give an AppDef, or a torchrun or Python command as a text or a list of words"
        )
    handle, runner = submit(
        app, scheduler, scheduler_cfg, idle_timeout=idle_timeout, workspace=workspace, role=role, runner=runner
    )
    if os.path.exists(CACHE):
        discard_cached_job(CACHE, "it is of an earlier job")
    return SPMDJob(handle, role, runner=runner, workspace=code, sync=sync, start_timeout=start_timeout)


def command_app(command: str | Sequence[str], name: str = "") -> AppDef:
    """Return an app with a torchrun or Python command as its one role."""
    from torchx.specs import AppDef, Role

    from torchx_monarch.command.command import check
    from torchx_monarch.command.rank_command import locate_rank_command

    words = split_command(command) or [""]
    role = Role("trainer", image="", entrypoint=words[0], args=words[1:])
    found = locate_rank_command(role)
    if found is None:
        advice = f". For a script: python {shlex.join(words)}" if words[0].endswith(".py") else ""
        raise ValueError(f"not a torchrun or Python command: {command!r}{advice}")
    if found.command.kind == "torchrun":
        role.num_replicas = found.command.options.max_nodes
    check(found.command, replicas=role.num_replicas)
    return AppDef(name or "spmd-job", [role])


def submit(
    app: AppDef,
    scheduler: str,
    scheduler_cfg: Mapping[str, Any] | None,
    *,
    idle_timeout: float,
    workspace: str | None = None,
    role: str = "",
    runner: Runner | None = None,
) -> tuple[str, Runner]:
    """Submit an app such that its hosts wait for runs; return its handle, and the runner that has submitted it.

    Raises as ``serve`` does.
    """
    from torchx_monarch.command.allocations import hold_for_runs
    from torchx_monarch.command.rank_command import rank_command
    from torchx_monarch.schedulers.monarch import scheduler_of

    if runner is None:
        from torchx.runner import get_runner

        runner = get_runner()
    scheduler_of(scheduler, runner)
    if not isinstance(scheduler_cfg or {}, Mapping):
        raise TypeError(f"scheduler_cfg={scheduler_cfg!r}: give a dict of run options, such as {{'grace': 10}}")
    held = hold_for_runs(app, idle_timeout)
    commands = {held_role.name: rank_command(held_role) for held_role in held.roles}
    names = [name for name, command in commands.items() if command is not None and command.kind == "hosts"]
    if role and role not in names:
        raise ValueError(f"role={role!r}: the roles of app {app.name!r} with hosts for runs are {', '.join(names)}")
    handle: str = runner.schedule(runner.dryrun(held, scheduler, dict(scheduler_cfg or {}), workspace=workspace))
    say(f"launched {handle}")
    return handle, runner
