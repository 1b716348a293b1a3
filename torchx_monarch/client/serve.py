# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Taking a live allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.client.hosts import START_TIMEOUT
from torchx_monarch.client.job import SPMDJob, words_of
from torchx_monarch.client.workspace_sync import When, check_when, current_workspace
from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDef


def serve(
    appdef: AppDef | str | Sequence[str],
    scheduler: str = "monarch_local",
    scheduler_cfg: Mapping[str, Any] | None = None,
    *,
    idle_timeout: float = IDLE_TIMEOUT,
    workspace: str | None = None,
    sync: When = "auto",
    role: str = "",
    start_timeout: float | None = START_TIMEOUT,
    runner: Runner | None = None,
) -> SPMDJob:
    """Take hosts that wait for runs, from any of our schedulers; returns as soon as they are asked for.

    The arguments of ``monarch.job.spmd.serve`` mean what they mean there. The app is not changed: a copy of it is
    submitted, whose commands wait instead of running.

    Args:
        appdef: an app; or a torchrun or Python command, with a host for each of its ``--nnodes``. A text is split as a
            shell would.
        scheduler: one of ours: ``monarch_local``, ``monarch_slurm``, ….
        scheduler_cfg: its run options.
        idle_timeout: seconds without a run after which the hosts end by themselves; 0 for never.
        workspace: folder with the code: the hosts begin with it as with ``torchx run --workspace``, and are brought
            what has changed in it before each run. None, with a command, for the current folder; with an app for none.
        sync: whether the hosts get a copy of it before each run; see ``client.workspace_sync.When``.
        role: the role whose hosts runs are for; empty for the first.
        start_timeout: seconds that a run, or anything else that needs the hosts, waits for them; None for no limit.
        runner: TorchX's; one is made where none is given.

    Raises:
        ValueError: the command is none, or the scheduler is not one of ours.
        Exception: what the scheduler raises when it does not take the app.
    """
    from torchx_monarch.command.command import CommandError
    from torchx_monarch.command.rewrite import hold

    check_when(sync)
    is_command = isinstance(appdef, (str, list, tuple))
    code = workspace or (current_workspace() if is_command else None)
    app = _app(words_of(appdef)) if is_command else appdef
    if not hasattr(app, "roles"):
        raise TypeError(
            f"appdef={appdef!r}: give an AppDef, or a torchrun or Python command as a text or a list of words"
        )
    if not scheduler.startswith("monarch_"):
        raise ValueError(f"scheduler={scheduler!r} does not hold hosts; those that do begin with monarch_")
    if runner is None:
        from torchx.runner import get_runner

        runner = get_runner()
    try:
        held = hold(app, idle_timeout)
    except CommandError as error:
        raise ValueError(str(error)) from None
    info = runner.dryrun(held, scheduler, dict(scheduler_cfg or {}), workspace=workspace)
    handle = runner.schedule(info)
    return SPMDJob(handle, role, runner=runner, workspace=code, sync=sync, start_timeout=start_timeout)


def _app(command: list[str]) -> AppDef:
    from torchx.specs import AppDef, Role

    from torchx_monarch.command.command import CommandError, parse

    try:
        parsed = parse(command)
    except CommandError as error:
        raise ValueError(str(error)) from None
    if parsed is None:
        raise ValueError(f"not a torchrun or Python command: {command!r}")
    replicas = parsed.options.max_nodes if parsed.kind == "torchrun" else 1
    role = Role("trainer", image="", entrypoint=command[0], args=command[1:], num_replicas=replicas)
    return AppDef("spmd-job", [role])
