# SPDX-License-Identifier: BSD-3-Clause
"""What a release consists of beside the package: the changelog, the citation, the forms for issues."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]

_SETUP = configparser.ConfigParser()
_SETUP.read(ROOT / "setup.cfg")
METADATA = _SETUP["metadata"]
URLS = dict(line.split(" = ") for line in METADATA["project_urls"].strip().splitlines())


def test_one_version_everywhere() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", METADATA["version"]]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (METADATA["version"], METADATA["license"])
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["repository-code"] == URLS["Source"] == METADATA["url"]
