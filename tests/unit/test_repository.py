# SPDX-License-Identifier: BSD-3-Clause
"""What the repository promises: releases that constraints.txt names, types, `make demo`, backends, its version."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import torchx_monarch
from tests.contract import every_time
from tests.contract.contract import QueueContract
from tests.contract.table import BACKENDS, PAGE, SCENARIOS, column, marks, written

ROOT = Path(__file__).parents[2]
PYTHONS = {"oldest supported": "3.10.0", "Debian 12": "3.11.2"}
LINES = (ROOT / "constraints.txt").read_text().splitlines()


def pins(python: str) -> dict[str, str]:
    """The versions that apply to a Python, by name."""
    environment = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
    found = [Requirement(line) for line in LINES if line and not line.startswith("#")]
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in found
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_each_supports(python: str) -> None:
    """Of the releases that are installed here: others have no metadata to look at."""
    installed: dict[str, importlib.metadata.Distribution] = {
        canonicalize_name(distribution.name): distribution for distribution in importlib.metadata.distributions()
    }
    looked_at = [
        installed[name]
        for name, version in pins(python).items()
        if name in installed and installed[name].version == version
    ]
    unfit = {
        f"{path.name} {path.version}": path.metadata["Requires-Python"]
        for path in looked_at
        if "Requires-Python" in path.metadata and python not in SpecifierSet(path.metadata["Requires-Python"])
    }
    assert len(looked_at) > 50 and not unfit


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_mypy_finds_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_says_what_it_waits_for_and_what_to_try_next(tmp_path: Path) -> None:
    """Nothing runs (``-n``), as on a machine on which nothing is installed yet (``-B``)."""
    command = ["make", "-n", "-B", f"VENV={tmp_path}/venv", "demo"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    lines = said.splitlines()
    [installs] = [index for index, line in enumerate(lines) if "pip install" in line and "-e '.[" in line]
    assert " -q" in lines[installs] and "exit 1" in lines[installs]  # pip speaks only if it fails
    assert any(line.startswith('echo "Installing torch') for line in lines[:installs])
    [runs] = [index for index, line in enumerate(lines) if line.startswith("torchx run ")]
    assert "import of torch" in lines[runs - 1]
    rest = [shlex.split(line, comments=True)[1:] for line in lines[runs + 1 :]]
    assert any("Three things to try next" in " ".join(words) for words in rest)
    shown = [words[0].split("#")[0].split() for words in rest if words and words[0].startswith("  torchx")]
    assert len(shown) == 4  # the third thing takes two commands
    for words in shown:
        if words[1] == "run":
            dryrun = [sys.executable, "-m", "torchx.cli.main", "run", "--dryrun", *words[2:]]
            subprocess.run(dryrun, cwd=ROOT, capture_output=True, timeout=120, check=True)


def test_the_contract_has_a_test_of_each_scenario() -> None:
    tests = [getattr(QueueContract, name) for name in dir(QueueContract) if name.startswith("test_")]
    assert {name for test in tests for name, _ in marks(test)} == set(SCENARIOS) - {"containers: pyxis"}
    assert {name.partition("[")[0] for name in every_time.BACKENDS} <= set(dir(QueueContract))


def test_the_page_says_what_is_tested() -> None:
    columns = {name: column(name) for name in BACKENDS}
    assert written(PAGE.read_text(), columns) == PAGE.read_text(), "run `python -m tests.contract.table`"


def test_the_example_is_short() -> None:
    """A backend for a batch system is at most 50 lines."""
    assert len((ROOT / "examples" / "task_spooler.py").read_text().splitlines()) <= 50


def requirements() -> dict[str, str]:
    """The dependencies of setup.cfg with their ranges."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = map(Requirement, setup["options"]["install_requires"].split())
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in found}


def test_hashes_are_of_the_pinned_releases() -> None:
    """And each requirement has some, or `pip install --require-hashes` refuses all."""
    blocks = re.split(r"\n(?=\w)", (ROOT / "packaging" / "requirements.txt").read_text())[1:]
    assert all("--hash=sha256:" in block for block in blocks)
    hashed = [Requirement(block.partition("\\")[0]) for block in blocks]
    assert {canonicalize_name(requirement.name) for requirement in hashed} > requirements().keys()
    for python in PYTHONS.values():
        environment = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
        pinned = pins(python)
        for requirement in hashed:
            if requirement.marker is None or requirement.marker.evaluate(environment):
                version = str(requirement.specifier).removeprefix("==")
                assert version == pinned.get(canonicalize_name(requirement.name), version), "make hashes"


def test_the_recipe_of_conda_forge_has_the_same_requirements() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text())
    found = [Requirement(line) for line in recipe["requirements"]["run"] if not line.startswith("python ")]
    ranges = {requirement.name.replace("pytorch", "torch"): str(requirement.specifier) for requirement in found}
    assert ranges == requirements()


def test_one_version_everywhere() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    metadata = setup["metadata"]
    urls = dict(line.split(" = ") for line in metadata["project_urls"].strip().splitlines())
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", metadata["version"]]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    recipe = yaml.safe_load((ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == metadata["version"] == torchx_monarch.__version__
    assert (citation["version"], citation["license"]) == (metadata["version"], metadata["license"])
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["repository-code"] == urls["Source"] == metadata["url"]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs" / "upstream").glob("*.patch")))
def test_a_proposal_fits_the_release_that_it_names(name: str, tmp_path: Path) -> None:
    patch = (ROOT / "docs" / "upstream" / name).read_text()
    against = re.search(r"^Against (\S+) (\d\S+)\.$", patch, re.MULTILINE)
    if against is None:
        assert "\nAgainst meta-pytorch/monarch at " in patch, "no release of a package: its sources have no wheel"
        return
    if not importlib.metadata.version(against[1]).startswith(against[2]):
        pytest.skip(f"{against[1]} {importlib.metadata.version(against[1])} is installed")
    for path in re.findall(r"^--- a/(\S+)", patch, re.MULTILINE):
        installed = Path(str(importlib.metadata.distribution(against[1]).locate_file(path.removeprefix("python/"))))
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(installed.read_text())
    subprocess.run(["git", "apply", "--check", "-"], cwd=tmp_path, input=patch, text=True, check=True, timeout=60)
