# SPDX-License-Identifier: BSD-3-Clause
"""Start a supervisor or a task: ``python -I -S entrypoint.py MODULE ...``, MODULE below ``torchx_monarch.backends``.

-S skips site-packages: the number of packages installed there costs start-up time on every node. -I keeps the user's
modules, such as a ``json.py``, out of the import path, and PYTHON* variables out of the interpreter.
"""

from __future__ import annotations

import importlib
import os
import sys


def main() -> None:
    root = os.path.abspath(__file__)
    for _ in range(3):
        root = os.path.dirname(root)
    # After the standard library, so that a package installed beside this one cannot shadow a standard module.
    sys.path.append(root)
    sys.exit(importlib.import_module(f"torchx_monarch.backends.{sys.argv[1]}").main(*sys.argv[2:]))


if __name__ == "__main__":
    main()
