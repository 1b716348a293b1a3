# SPDX-License-Identifier: BSD-3-Clause
"""The releases that constraints.txt names."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PYTHONS = {"oldest supported": "3.10.0", "Debian 12": "3.11.2"}

LINES = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()


def pins(python: str) -> dict[str, str]:
    """The versions that apply to a Python, by name."""
    environment = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
    found = [Requirement(line) for line in LINES if line and not line.startswith("#")]
    return {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in found
        if each.marker is None or each.marker.evaluate(environment)
    }


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_each_supports(python: str) -> None:
    """Of the releases that are installed here: others have no metadata to look at."""
    installed: dict[str, importlib.metadata.Distribution] = {
        canonicalize_name(each.name): each for each in importlib.metadata.distributions()
    }
    looked_at = [
        installed[name]
        for name, version in pins(python).items()
        if name in installed and installed[name].version == version
    ]
    unfit = {
        f"{each.name} {each.version}": wanted
        for each in looked_at
        if (wanted := each.metadata["Requires-Python"]) and python not in SpecifierSet(wanted)
    }
    assert len(looked_at) > 50 and not unfit
