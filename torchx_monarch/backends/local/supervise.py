# SPDX-License-Identifier: BSD-3-Clause
"""The script that the supervisor's interpreter runs: ``python -I -S supervise.py <app folder> <pipe> <lock>``.

That interpreter sees neither the user's PYTHON* variables nor the current folder nor site-packages: a ``json.py``
beside the user's script cannot break the supervisor, and nothing slows its start. The script finds this package by its
own path.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    root = os.path.abspath(__file__)
    for _ in range(4):
        root = os.path.dirname(root)
    # After the standard library, so that no module installed beside this package can shadow a part of it.
    sys.path.append(root)
    from torchx_monarch.backends.local import supervisor

    supervisor.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
