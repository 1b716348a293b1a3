# SPDX-License-Identifier: BSD-3-Clause
"""What a release consists of beside the package: the changelog, the citation, the forms for issues."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

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


def test_the_changelog_says_nothing_twice() -> None:
    """As it does when two changes of it are merged and each keeps the other's lines."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    entries = [line for line in lines if line.startswith(("- ", "#"))]
    assert sorted(set(entries)) == sorted(entries)


def test_one_address_of_the_project() -> None:
    """Of a page, a form or a message that names it."""
    named = set()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *FORMS]:
        named |= set(re.findall(r"https://github\.com/[\w-]+/torchx-monarch\b", path.read_text()))
    assert named == {URLS["Source"]}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_are_those_of_github(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert set(form) == {"blank_issues_enabled", "contact_links"}
        assert all(set(link) == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= set(form)
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert re.fullmatch(r"[\w-]+", part["id"]) and part["attributes"]["label"]


def test_the_form_knows_all_schedulers() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (part,) = [part for part in form["body"] if part["type"] == "dropdown"]
    points = _SETUP["options.entry_points"]["torchx.schedulers"]
    ours = re.findall(r"^\s*(monarch_\w+) =", points, re.MULTILINE)
    assert set(ours) <= set(part["attributes"]["options"])
