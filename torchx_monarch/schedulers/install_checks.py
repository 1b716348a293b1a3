# SPDX-License-Identifier: BSD-3-Clause
"""Check that TorchX is the one that torchx-monarch needs."""

from __future__ import annotations

import logging
import os
import sys
from importlib import metadata

REMEDY = "run: pip uninstall -y torchx torchx-nightly && pip install torchx-nightly"
"""What to do where ``torchx`` and ``torchx-nightly``, which own the same files, are both installed."""

_log = logging.getLogger("torchx_monarch")


def installed_version(name: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def require_torchx_nightly() -> None:
    """Check that the importable ``torchx`` is torchx-nightly: the stable release lacks ``Role.workspace`` and more.

    Log a warning if both distributions are installed and the files in place are the nightly's.
    """
    stable = installed_version("torchx")
    from torchx.specs import Role

    if "workspace" not in getattr(Role, "__dataclass_fields__", {}):
        found = f"torchx {stable or '(an early nightly)'}"
        message = f"torchx-monarch needs the files of torchx-nightly, and has those of {found}; {REMEDY}"
        if os.path.basename(sys.argv[0]) == "torchx":  # which would show a traceback
            raise SystemExit(message)
        raise ImportError(message)
    if stable:
        beside = f"torchx {stable} is installed beside torchx-nightly, and each overwrites files of the other"
        _log.warning("%s; %s", beside, REMEDY)
