# SPDX-License-Identifier: BSD-3-Clause
"""Check what is installed: Python, the packages that torchx-monarch needs, its registration with TorchX."""

from __future__ import annotations

import glob
import logging
import operator
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from torchx_monarch.model.check_result import CheckResult, check

_PYTHONS = ((3, 10), (3, 13))
"""The oldest and the newest Python that is tested."""

_SHOWN = ("torch", "torchx-nightly", "torchmonarch")
"""The requirements that are reported also if nothing is wrong."""

_ENTRY_POINTS = {"torchx.schedulers": "monarch_local", "torchx.cli.cmds": "monarch", "torchx.components": "monarch"}
"""An entry point of this package in each of TorchX's groups."""

_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}

_REMEDY = "run: pip uninstall -y torchx torchx-nightly && pip install torchx-nightly"

logger = logging.getLogger("torchx_monarch")


def check_installation() -> Iterator[CheckResult]:
    """Check the interpreter and the packages that every scheduler needs."""
    low, high = _PYTHONS
    tested = f"torchx-monarch is tested with Python {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    found = sys.version_info[:2]
    yield check(
        "python",
        f"{platform.python_version()} ({sys.executable})",
        fail=f"{tested}: make an environment with one of these" if found < low else "",
        warn=tested if found > high else "",
    )
    own = _version("torchx-monarch")
    advice = "it is not installed, only importable; run: pip install torchx-monarch"
    yield check("torchx-monarch", own, fail="" if own else advice)
    for requirement in _requirements(""):
        result = check_requirement(*requirement)
        if result.level != "ok" or requirement[0] in _SHOWN:
            yield result
    if stable := _version("torchx"):
        advice = "it owns the same files as torchx-nightly, and lacks what torchx-monarch needs"
        yield check("torchx", stable, fail=f"{advice}; {_REMEDY}")
    yield check_devices(_version("torch"), len(glob.glob("/dev/nvidia[0-9]*")))
    yield from _check_registration()


def check_extra(extra: str) -> list[CheckResult]:
    """Check the packages of an extra of this package, such as ``docker``; return the wrong ones."""
    results = [check_requirement(*requirement) for requirement in _requirements(extra)]
    return [result for result in results if result.level != "ok"]


def check_requirement(name: str, versions: str) -> CheckResult:
    """Check that a package is installed, in a version of the range (``>=0.7,<0.8``; empty for any)."""
    found = _version(name)
    install = f"run: pip install '{name}{versions}'"
    if not found:
        return check(name, "not installed", fail=install)
    return check(name, found, fail="" if in_range(found, versions) else f"torchx-monarch needs {versions}; {install}")


def in_range(version: str, versions: str) -> bool:
    """Return whether a version is in a range such as ``>=29,!=37.0.2``, comparing the numbers of the releases alone.

    ``packaging`` can do more, and is not a requirement of this package.
    """
    clauses = re.findall(r"([<>=!]=?)\s*([\d.]+)", versions)
    return all(_COMPARE[operation](_release(version), _release(limit)) for operation, limit in clauses)


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without zeros at the end: (2, 13) of ``2.13.0+cpu``."""
    found = re.match(r"(\d+(\.\d+)*?)(\.0)*(?![.\d])", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def check_devices(torch: str, devices: int) -> CheckResult:
    """Check that torch, of this version, can use the GPUs of this machine."""
    unused = devices and torch.endswith("+cpu")
    advice = f"torch {torch} is built without CUDA; install a build with it (https://pytorch.org/get-started/locally)"
    return check("GPUs", f"{devices} of NVIDIA", warn=advice if unused else "")


def _check_registration() -> Iterator[CheckResult]:
    """Check that TorchX finds this package's schedulers, commands and components by their entry points."""
    missing = [group for group, name in _ENTRY_POINTS.items() if name not in metadata.entry_points(group=group).names]
    advice = f"{', '.join(missing)} lack this package: install torchx-monarch again, with pip"
    yield check("entry points", ", ".join(_ENTRY_POINTS), fail=advice if missing else "")
    from torchx_monarch.schedulers import registered

    found = [name for name in registered() if name.startswith("monarch_")]
    advice = "TorchX lists none of this package: install torchx-monarch again, with pip"
    yield check("schedulers", ", ".join(found), fail="" if found else advice)


def _requirements(extra: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the versions of each requirement of this package, or of one of its extras."""
    try:
        requirements = metadata.requires("torchx-monarch") or []
    except metadata.PackageNotFoundError:
        return
    for text in requirements:
        found = re.match(r"([\w.-]+)\s*([^;]*)(?:;.*extra == [\"'](.+?)[\"'])?", text)
        if found and (found[3] or "") == extra:
            yield found[1], found[2].strip()


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
        import torchx

        version = getattr(getattr(torchx, "version", None), "__version__", stable) or "unknown"
        beside = " (it has overwritten torchx-nightly's files)" if stable else ""
        message = f"torchx-monarch needs torchx-nightly, but torchx {version} is installed{beside}; {_REMEDY}"
        if os.path.basename(sys.argv[0]) == "torchx":  # which would show a traceback
            raise SystemExit(message)
        raise ImportError(message)
    if stable:
        logger.warning(
            "torchx %s is installed beside torchx-nightly and either overwrites the other's files; %s", stable, _REMEDY
        )
