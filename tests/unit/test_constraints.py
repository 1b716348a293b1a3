# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The releases that constraints.txt names."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

DEBIAN_12 = "3.11.2"
"""The Python of Debian 12."""

LINES = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()


def test_each_supports_the_python_of_debian_12() -> None:
    pinned = {
        canonicalize_name(found[1]): found[2] for line in LINES if (found := re.match(r"([\w.-]+)==([^\s;]+)", line))
    }
    installed = {canonicalize_name(each.name): each for each in importlib.metadata.distributions()}
    looked_at = [installed[name] for name, version in pinned.items() if name in installed]
    unfit = {
        f"{each.name} {each.version}": wanted
        for each in looked_at
        if (wanted := each.metadata["Requires-Python"]) and DEBIAN_12 not in SpecifierSet(wanted)
    }
    assert len(looked_at) > 50 and not unfit
