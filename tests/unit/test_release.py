# SPDX-License-Identifier: BSD-3-Clause
"""What a release is checked for, and that each step of a workflow is a target of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools import release

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-11-29

- A page ([how](docs/a.md), [there](https://example.org/)).

## [1.2.2] - 2026-11-28

- Older.

[1.2.3]: https://example.org/
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a repository whose version is 1.2.3."""
    (tmp_path / "setup.cfg").write_text("[metadata]\nversion = 1.2.3\nurl = https://example.org/repo\n")
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_a_release_has_one_version_everywhere(root: Path) -> None:
    assert release.problems("v1.2.3", root) == []
    notes = "- A page ([how](https://example.org/repo/blob/v1.2.3/docs/a.md), [there](https://example.org/)).\n"
    assert release.notes("1.2.3", root) == notes
    assert release.problems("1.2.3", root) == ["the tag is '1.2.3'; give vX.Y.Z"]
    assert [problem.partition(" ")[0] for problem in release.problems("v1.3.0", root)] == [
        "setup.cfg",
        "CITATION.cff",
        "CHANGELOG.md",
        "CHANGELOG.md",
    ]


def test_workflows_run_what_developers_run() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    prepares = ("apt-get ", "git config ", "gh release ")
    steps = [
        (path.name, step["run"])
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step and not step["run"].startswith(prepares)
    ]
    assert {name for name, _ in steps} == {"ci.yml", "newest.yml", "release.yml"}
    others = [(name, run) for name, run in steps if run != ".ci/run" and run.split()[:1] != ["make"]]
    assert not others
    assert {run.split()[1] for _, run in steps if run.startswith("make ")} <= targets
