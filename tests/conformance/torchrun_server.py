# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torchrun without its two seconds of importing torch: a process that has imported it forks for every launch.

Run as a script. A line on stdin is a launch, ``{"args", "env", "cwd", "stdin", "stdout", "stderr"}``, the last three
paths, and answered by its process; or ``{"wait": process}``, answered by the exit code when it has ended. torchrun
starts its ranks as new programs, so nothing of the fork is left in them.
"""

from __future__ import annotations

import json
import os
import sys

from torch.distributed.run import main


def serve() -> list[str]:
    """Answer launches until there are no more; returns, in the fork alone, the arguments of a launch."""
    for line in iter(sys.stdin.readline, ""):
        launch = json.loads(line)
        if "wait" in launch:
            print(os.waitstatus_to_exitcode(os.waitpid(launch["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.chdir(launch["cwd"])
            os.environ.clear()
            os.environ.update(launch["env"])
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                descriptor = os.open(launch[name], os.O_RDWR)
                os.dup2(descriptor, number)
                os.close(descriptor)
            args: list[str] = launch["args"]
            return args
        print(pid, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(serve())
