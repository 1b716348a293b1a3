# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The file that the supervisor's interpreter is started with: ``python -I -S supervise.py <app folder> <descriptor>``.

That interpreter sees neither the user's PYTHON* variables nor the current folder nor site-packages: a ``json.py``
beside the user's script cannot break the supervisor, and nothing slows its start. It finds this package by where this
file lies.
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
    from torchx_monarch.backends.local import supervisor

    supervisor.main(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
