# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choose the workload of a host by its role's command."""

from __future__ import annotations

from torchx_monarch.command.actors import is_actors
from torchx_monarch.command.command import CommandError, parse
from torchx_monarch.host.spmd_workload import SpmdWorkload
from torchx_monarch.host.workload import Host, Workload


def workload_of(host: Host) -> Workload:
    """Return the workload of a host: actors, the runs of a live allocation, or the run of a batch job.

    A command that is not valid counts as a batch job's: parsing it again reports the error.
    """
    if is_actors(host.options.command):
        from torchx_monarch.host.actor_workload import ActorWorkload

        return ActorWorkload(host)
    try:
        command = parse(host.options.command, host.environ)
    except CommandError:
        command = None
    if command is not None and command.kind == "hosts":
        from torchx_monarch.host.live_runs import LiveRuns

        return SpmdWorkload(host, LiveRuns(host))
    from torchx_monarch.host.batch_run import BatchRun

    return SpmdWorkload(host, BatchRun(host))
