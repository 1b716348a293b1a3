# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torchx_monarch.hosts [options] [-- COMMAND]``: an allocation (``command.allocation_spec``).

The schedulers ``monarch_*`` run such a role in their own host processes. This module runs only where another scheduler
has been given the role, and says so.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Say what should run instead, and ask for no retry."""
    print(
        "torchx_monarch.hosts: this role is an allocation that waits for runs, and the scheduler that started it does "
        "not know how. Submit it with one of torchx-monarch's: monarch_local, monarch_docker, monarch_slurm, "
        "monarch_aws_batch.",
        file=sys.stderr,
    )
    sys.exit(os.EX_CONFIG)


if __name__ == "__main__":
    main()
