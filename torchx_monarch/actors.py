# SPDX-License-Identifier: BSD-3-Clause
"""Placeholder command of a role that runs the script of a Monarch controller (``command.allocation_spec``).

The ``monarch_*`` schedulers start Monarch hosts instead. This module runs only when another scheduler or a user starts
it; it prints an error and exits.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.exit(
        "python -m torchx_monarch.actors is for the schedulers of torchx-monarch, which start a Monarch host for it: "
        "torchx run -s monarch_local ..., and not by itself"
    )
