# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch init``: what it writes into a .torchxconfig, and what it leaves alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchx.runner import config

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.main import load

NEW = "[cli:run]\nscheduler = monarch_local\n\n[cli:list]\nscheduler = monarch_local\n"

Init = Callable[..., tuple[int, str, str]]


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Init]:
    """Run ``torchx monarch init`` in an empty folder; its exit code, stdout and stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("TORCHXCONFIG", raising=False)
    monkeypatch.setattr(config, "DEFAULT_CONFIG_DIRS", [str(tmp_path / "home"), str(work)])

    def run(*words: str) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        load("init").add_arguments(parser)
        code, error = 0, ""
        try:
            load("init").run(parser.parse_args(words))
        except UserError as refusal:
            code, error = exit_codes.USAGE, f"{refusal}\n"
        said = capsys.readouterr()
        return code, said.out, said.err + error

    yield run


def test_a_folder_without_a_file(init: Init) -> None:
    code, out, err = init()
    path = Path(".torchxconfig")
    assert (code, err) == (0, "") and path.read_text() == NEW
    assert str(path.absolute()) in out and "use monarch_local now" in out
    assert [config.get_config("cli", name, "scheduler") for name in ("run", "list")] == ["monarch_local"] * 2
    assert "nothing was written" in init()[1] and path.read_text() == NEW


def test_json(init: Init) -> None:
    code, out, _ = init("--json", "-s", "monarch_slurm")
    said = json.loads(out)
    assert code == 0 and said.pop("path") == str(Path(".torchxconfig").absolute())
    assert said == {"scheduler": "monarch_slurm", "written": True}


def test_other_sections_stay(init: Init) -> None:
    path = Path(".torchxconfig")
    path.write_text("# ours\n[slurm]\npartition = main")
    assert init()[0] == 0
    assert path.read_text() == f"# ours\n[slurm]\npartition = main\n{NEW}"


@pytest.mark.parametrize("section", ["[cli:run]\nscheduler: slurm\n", "[cli:list]\nworkspace = .\n"])
def test_a_section_that_exists_is_its_owners(init: Init, section: str) -> None:
    path = Path(".torchxconfig")
    path.write_text(section)
    code, out, err = init()
    assert code == 64 and out == "" and "Write `scheduler = monarch_local` into its sections" in err
    assert path.read_text() == section


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        ("-s monarch_lcoal", "", "there is no scheduler monarch_lcoal. Did you mean monarch_local?"),
        ("", "scheduler = slurm\n", "File contains no section headers"),
        ("", "[cli:run]\n[cli:run]\n", "section 'cli:run' already exists"),
    ],
)
def test_refusals(init: Init, words: str, text: str, said: str) -> None:
    Path(".torchxconfig").write_text(text)
    code, out, err = init(*words.split())
    assert code == 64 and out == "" and said in err and len(err.splitlines()) == 1
    assert Path(".torchxconfig").read_text() == text


def test_a_folder_that_cannot_be_written(init: Init) -> None:
    Path(".torchxconfig").mkdir()
    code, _, err = init()
    assert code == 64 and "Is a directory" in err


def test_files_that_come_first_are_named(init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".torchxconfig").write_text("[cli:run]\nscheduler = slurm\n")
    code, _, err = init()
    assert code == 0 and "another .torchxconfig comes first for TorchX, and names slurm" in err
    monkeypatch.setenv("TORCHXCONFIG", str(home / ".torchxconfig"))
    assert "comes first for TorchX, and names slurm" in init()[2]
