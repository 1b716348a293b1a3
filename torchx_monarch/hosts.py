# SPDX-License-Identifier: BSD-3-Clause
"""Placeholder command of an allocation: ``python -m torchx_monarch.hosts [options] [-- COMMAND]``.

The ``monarch_*`` schedulers recognise this command (``command.allocation_spec``) and start their own host processes
instead. This module runs only when another scheduler starts the role. EX_CONFIG asks for no retry.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    print(
        "torchx_monarch.hosts: this role is an allocation that waits for runs, and the scheduler that started it does "
        "not know how. Submit it with -s monarch_slurm or another monarch_* scheduler (`torchx runopts` lists them).",
        file=sys.stderr,
    )
    sys.exit(os.EX_CONFIG)
