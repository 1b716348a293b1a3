# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The command of a role whose hosts wait for actors (``command.actors``); a scheduler of ours runs it."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.exit(
        "python -m torchx_monarch.actors is for the schedulers of torchx-monarch, which start a Monarch host for it: "
        "torchx run -s monarch_local ..., and not by itself"
    )
