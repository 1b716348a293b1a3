# SPDX-License-Identifier: BSD-3-Clause
"""The survey of shared imports finds what ranks must not share; packages that many use are examined by nightly runs."""

from __future__ import annotations

import venv

import pytest

from tests.survey.survey import Finding, examine

PURE = """
import os, random, uuid
own, table, names, session = random.Random(), {"a": [1, 2]}, frozenset("abc"), uuid.uuid4()
settings = {name: value for name, value in os.environ.items() if name.startswith("PURE_")}
"""

IMPURE = """
import functools, os, pathlib, secrets

class Client:
    __slots__ = ("pid",)

def connect(token=secrets.token_hex()):
    return token

@functools.lru_cache
def settings():
    return pathlib.Path(os.environ["HOME"], ".config", "survey.ini").read_text()

client = Client()
client.pid = os.getpid()
settings()
later = pathlib.Path("survey.ini").exists()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a new environment, in which the two packages are installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    [place] = (folder / "lib").glob("python*/site-packages")
    (place / "pure.py").write_text(PURE)
    (place / "impure.py").write_text(IMPURE)
    return str(folder / "bin" / "python")


def test_ranks_may_share_a_pure_module(python: str) -> None:
    found = examine(python, "import pure")
    assert (found.error, found.unshared, found.wrong) == ("", "", {})


def test_the_survey_finds_what_ranks_share_wrongly(python: str) -> None:
    """A module that the user has preloaded is shared, whatever it does."""
    found = examine(python, "import impure", ("--preload", "impure"))
    paths = {path.partition("<")[0] for path in found.wrong}
    assert paths == {"impure.connect(default 0)", "impure.client.pid", "impure.settings", "impure.later"}, found


def test_ranks_do_not_share_what_they_must_not(python: str) -> None:
    found = examine(python, "import impure")
    assert "impure" in found.unshared and found.wrong == {}, found


def test_the_survey_says_why_an_import_cannot_be_examined(python: str) -> None:
    assert examine(python, "import nosuch") == Finding(error="ModuleNotFoundError: No module named 'nosuch'")
