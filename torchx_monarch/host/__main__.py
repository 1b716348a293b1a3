# SPDX-License-Identifier: BSD-3-Clause
"""Run the host process of one replica: ``python -m torchx_monarch.host [options] -- COMMAND``."""

from __future__ import annotations

import functools
import gc
import os
import sys

# `python -m` puts the working folder first in sys.path: a `monarch.py` or `types.py` of the user's must not shadow the
# modules that this process imports. (With -P, from Python 3.11 on, Python does not put it there.)
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from collections.abc import Callable  # noqa: E402
from typing import Any, NoReturn  # noqa: E402


def main(argv: list[str]) -> NoReturn:
    """Run one replica of a role to its end: ``argv`` has the options, ``--``, and the role's command."""
    gc.disable()  # what is imported stays: to scan it for garbage again and again takes a tenth of the imports
    from torchx_monarch.model.host_spec import HostSpec
    from torchx_monarch.system import processes

    processes.become_subreaper()
    options = HostSpec.from_argv(argv)
    # The rest of the imports takes two thirds of a host's start: the command, or the zygote's imports, run meanwhile.
    choose: Callable[[Any], Any]
    if options.workload == "command":
        from torchx_monarch.host import command_process

        started = command_process.start_early(options, os.environ)
        from torchx_monarch.host.command_run import CommandRun

        choose = functools.partial(CommandRun, started=started)
    else:
        from torchx_monarch.host.ranks import zygote_process

        early = zygote_process.start_early(options, os.environ)
        from torchx_monarch.host.rank_runs import RankRuns

        choose = functools.partial(RankRuns, early=early)
    from torchx_monarch.host.host_process import HostProcess

    gc.enable()
    gc.set_threshold(50_000)  # by Python's 700, they take a tenth of the time in which replica 0 registers 4,096 hosts
    try:
        host = HostProcess(options, os.environ, choose)
    except OSError as error:
        sys.exit(f"[monarch] host {options.replica} cannot start: {error}{processes.limit_hint(error)}")
    host.main()


if __name__ == "__main__":
    main(sys.argv[1:])
