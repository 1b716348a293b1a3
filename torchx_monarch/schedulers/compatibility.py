# SPDX-License-Identifier: BSD-3-Clause
"""Detect the distribution ``torchx`` installed instead of, or beside, ``torchx-nightly``: both own the same files."""

from __future__ import annotations

import logging
import os
import sys
from importlib import metadata

logger = logging.getLogger("torchx_monarch")

_REMEDY = "run: pip uninstall -y torchx torchx-nightly && pip install torchx-nightly"


def require_torchx_nightly() -> None:
    """Check that the importable ``torchx`` is torchx-nightly.

    Log a warning if both distributions are installed and the files in place are the nightly's.

    Raises:
        ImportError: ``torchx`` is the stable release, which lacks ``Role.workspace`` and more.
        SystemExit: the same inside the ``torchx`` command, to avoid a traceback.
    """
    try:
        stable = metadata.version("torchx")
    except metadata.PackageNotFoundError:
        stable = ""
    from torchx.specs import Role

    if not hasattr(Role, "__dataclass_fields__") or "workspace" not in Role.__dataclass_fields__:
        import torchx

        version = getattr(getattr(torchx, "version", None), "__version__", stable) or "unknown"
        beside = " (it has overwritten torchx-nightly's files)" if stable else ""
        message = f"torchx-monarch needs torchx-nightly, but torchx {version} is installed{beside}; {_REMEDY}"
        if os.path.basename(sys.argv[0]) == "torchx":
            raise SystemExit(message)
        raise ImportError(message)
    if stable:
        logger.warning(
            "torchx %s is installed beside torchx-nightly and either overwrites the other's files; %s", stable, _REMEDY
        )
