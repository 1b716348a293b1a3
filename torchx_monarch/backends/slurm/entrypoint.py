# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The file that the batch step and the tasks are started with: ``python -I -S start.py job|task ...``.

Both flags keep out what they do not need: the packages installed beside this one, whose mere presence costs time on
every node, and a ``json.py`` of the user's.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    root = os.path.abspath(__file__)
    for _ in range(4):
        root = os.path.dirname(root)
    # Behind the standard library, so that nothing installed beside this package can stand in for a part of it.
    sys.path.append(root)
    if sys.argv[1] == "job":
        from torchx_monarch.backends.slurm import batch_step

        batch_step.main(sys.argv[2:])
    from torchx_monarch.backends.slurm import task_start

    started_task = task_start.begin(sys.argv[2:])
    from torchx_monarch.backends.slurm import task

    task.run(started_task)


if __name__ == "__main__":
    main()
