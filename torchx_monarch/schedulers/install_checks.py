# SPDX-License-Identifier: BSD-3-Clause
"""Check what is installed: the packages that torchx-monarch needs."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from torchx_monarch.model.check_result import CheckResult, check

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_SHOWN = ("torch", "torchx-nightly", "torchmonarch")
"""The requirements that are reported also if nothing is wrong."""

_REMEDY = "run: pip uninstall -y torchx torchx-nightly && pip install torchx-nightly"

logger = logging.getLogger("torchx_monarch")

_PARSING = threading.Lock()
"""packaging reads strings by ``ast.literal_eval``, which in Python 3.11 may fail in two threads at once: "AST
constructor recursion depth mismatch" (python/cpython#106905)."""


def check_installation() -> Iterator[CheckResult]:
    """Check the packages that every scheduler needs."""
    yield check("python", f"{platform.python_version()} ({sys.executable})")
    yield check("torchx-monarch", _version("torchx-monarch"))
    for requirement in _requirements(""):
        result = check_requirement(requirement)
        if result.level != "ok" or requirement.name in _SHOWN:
            yield result
    if stable := _version("torchx"):
        advice = "it owns the same files as torchx-nightly, and lacks what torchx-monarch needs"
        yield check("torchx", stable, fail=f"{advice}; {_REMEDY}")


def check_extra(extra: str) -> list[CheckResult]:
    """Check the packages of an extra of this package, such as ``docker``; return the wrong ones."""
    results = [check_requirement(requirement) for requirement in _requirements(extra)]
    return [result for result in results if result.level != "ok"]


def check_requirement(requirement: Requirement) -> CheckResult:
    """Check that a package is installed, in a version of the required range."""
    found, versions = _version(requirement.name), requirement.specifier
    install = f"run: pip install '{requirement.name}{versions}'"
    if not found:
        return check(requirement.name, "not installed", fail=install)
    fits = versions.contains(found, prereleases=True)
    return check(requirement.name, found, fail="" if fits else f"torchx-monarch needs {versions}; {install}")


def _requirements(extra: str) -> Iterator[Requirement]:
    """Yield the requirements of this package, or of one of its extras."""
    from packaging.requirements import Requirement  # each submission imports this module

    with _PARSING:
        requirements = [Requirement(text) for text in metadata.requires("torchx-monarch") or []]
    for requirement in requirements:
        marker = requirement.marker
        if marker is None and not extra or extra and marker is not None and marker.evaluate({"extra": extra}):
            yield requirement


def _version(name: str) -> str:
    """Return the version of an installed package; empty for none."""
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
            "torchx %s is installed beside torchx-nightly and either overwrites the other's files; %s", stable, _REMEDY
        )
