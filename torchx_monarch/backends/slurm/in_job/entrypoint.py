# SPDX-License-Identifier: BSD-3-Clause
"""Start the batch step or a task: ``python -I -S entrypoint.py job|task ...``.

-S skips site-packages: the number of packages installed there costs start-up time on every node. -I keeps the user's
modules, such as a ``json.py``, out of the import path.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    root = os.path.abspath(__file__)
    for _ in range(5):
        root = os.path.dirname(root)
    # After the standard library, so that a package installed beside this one cannot shadow a standard module.
    sys.path.append(root)
    if sys.argv[1] == "job":
        from torchx_monarch.backends.slurm.in_job import batch_step

        batch_step.main(sys.argv[2:])
    from torchx_monarch.backends.slurm.in_job import task_start

    started_task = task_start.begin(sys.argv[2:])
    from torchx_monarch.backends.slurm.in_job import task

    task.run(started_task)


if __name__ == "__main__":
    main()
