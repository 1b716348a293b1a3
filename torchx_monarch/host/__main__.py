# SPDX-License-Identifier: BSD-3-Clause
"""Run the host process of one replica: ``python -m torchx_monarch.host [options] -- COMMAND``."""

from __future__ import annotations

import gc
import os
import sys

# `python -m` puts the working folder first in sys.path: a `monarch.py` or `types.py` of the user's must not shadow the
# modules that this process imports. (With -P, from Python 3.11 on, Python does not put it there.)
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from typing import TYPE_CHECKING, NoReturn  # noqa: E402

if TYPE_CHECKING:
    from torchx_monarch.host.host import Host
    from torchx_monarch.host.ranks.zygote_process import ZygoteProcess
    from torchx_monarch.host.workload import Workload


def main(argv: list[str]) -> NoReturn:
    """Run one replica of a role to its end: ``argv`` has the options, ``--``, and the role's command."""
    gc.disable()  # what is imported stays: to scan it for garbage again and again takes a tenth of the imports
    from torchx_monarch.host.ranks.zygote_process import start_early
    from torchx_monarch.model.host_spec import HostSpec
    from torchx_monarch.system import processes

    processes.become_subreaper()
    options = HostSpec.from_argv(argv, __doc__ or "")
    early = start_early(options, os.environ)
    # The rest of the imports takes two thirds of a host's start; the zygote imports meanwhile.
    from torchx_monarch.host.host_process import HostProcess

    processes.collect_rarely()
    gc.enable()
    HostProcess(options, os.environ, lambda host: choose_workload(host, early)).main()


def choose_workload(host: Host, early: ZygoteProcess | None = None) -> Workload:
    """Return the workload of a role's command: the runs of a live allocation, or the run of a batch job.

    A command that is not valid counts as a batch job's: parsing it again reports the error.
    """
    from torchx_monarch.command.command import CommandError, parse

    try:
        command = parse(host.options.command, host.environ)
    except CommandError:
        command = None
    if command is not None and command.kind == "hosts":
        from torchx_monarch.host.live_runs import LiveRuns

        return LiveRuns(host)
    from torchx_monarch.host.workload import BatchRun

    return BatchRun(host, early)


if __name__ == "__main__":
    main(sys.argv[1:])
