# SPDX-License-Identifier: BSD-3-Clause
"""Check what is installed: the packages that torchx-monarch needs."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from torchx_monarch.model.check_result import CheckResult

_REMEDY = "run: pip uninstall -y torchx torchx-nightly && pip install torchx-nightly"

logger = logging.getLogger("torchx_monarch")


def check_installation() -> Iterator[CheckResult]:
    """Check the packages that every scheduler needs; ``pip check`` compares the versions of all with what is needed."""
    yield CheckResult("python", f"{platform.python_version()} ({sys.executable})")
    for name in ("torchx-monarch", "torch", "torchx-nightly", "torchmonarch"):
        found = _version(name)
        yield CheckResult(name, found or "not installed", advice="" if found else f"run: pip install {name}")
    if stable := _version("torchx"):
        advice = "it owns the same files as torchx-nightly, and lacks what torchx-monarch needs"
        yield CheckResult("torchx", stable, advice=f"{advice}; {_REMEDY}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def require_torchx_nightly() -> None:
    """Check that the importable ``torchx`` is torchx-nightly: the stable release lacks ``Role.workspace`` and more.

    Log a warning if both distributions are installed and the files in place are the nightly's.
    """
    stable = _version("torchx")
    from torchx.specs import Role

    if "workspace" not in getattr(Role, "__dataclass_fields__", {}):
        found = f"torchx {stable or '(an early nightly)'}"
        message = f"torchx-monarch needs the files of torchx-nightly, and has those of {found}; {_REMEDY}"
        if os.path.basename(sys.argv[0]) == "torchx":  # which would show a traceback
            raise SystemExit(message)
        raise ImportError(message)
    if stable:
        logger.warning(
            "torchx %s is installed beside torchx-nightly, and each overwrites files of the other; %s", stable, _REMEDY
        )
