# SPDX-License-Identifier: BSD-3-Clause
"""All of the package's metadata is in setup.cfg but its description: README with links that lead somewhere on PyPI."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from setuptools import setup

_ROOT = Path(__file__).resolve().parent


def description() -> str:
    """Return README with absolute links to its files at the project's source."""
    config = configparser.ConfigParser()
    config.read(_ROOT / "setup.cfg")
    urls = dict(line.split(" = ") for line in config["metadata"]["project_urls"].strip().splitlines())

    def absolute(match: re.Match[str]) -> str:
        return f"{match[1]}({urls['Source']}/blob/main/{match[2]})"

    return re.sub(r"(\[[^]]*\])\((?!\w+:|#)([^)]+)\)", absolute, (_ROOT / "README.md").read_text())


if __name__ == "__main__":
    setup(long_description=description())
