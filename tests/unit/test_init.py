# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch init``: what it writes into a .torchxconfig, and what it leaves alone."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.runner import config

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.init import ConfigSyntaxError, value_of, with_value
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
    assert str(path.absolute()) in out and "[cli:run] scheduler = monarch_local" in out
    assert [config.get_config("cli", name, "scheduler") for name in ("run", "list")] == ["monarch_local"] * 2
    assert "nothing was written" in init()[1] and path.read_text() == NEW


def test_a_dry_run(init: Init) -> None:
    assert init("--dry-run") == (0, NEW, "") and not os.listdir()


def test_json(init: Init) -> None:
    code, out, _ = init("--json", "-s", "monarch_slurm")
    said = json.loads(out)
    assert code == 0 and said.pop("path") == str(Path(".torchxconfig").absolute())
    assert said == {"scheduler": "monarch_slurm", "sections": ["cli:run", "cli:list"], "dry_run": False}


def test_a_file_is_completed_and_its_settings_stay(init: Init) -> None:
    path = Path(".torchxconfig")
    text = "# ours\n[cli:run]\ncomponent = dist.ddp\n\n; more\n[slurm]\npartition = main\n"
    path.write_text(text)
    path.chmod(0o640)
    assert init()[0] == 0
    added = "[cli:run]\nscheduler = monarch_local\n"
    assert path.read_text() == text.replace("[cli:run]\n", added) + "\n[cli:list]\nscheduler = monarch_local\n"
    assert path.stat().st_mode & 0o777 == 0o640 and os.listdir() == [".torchxconfig"]


@pytest.mark.parametrize(
    "text", ["# ours\r\n[cli:run]\r\nscheduler = slurm\r\n\r\n[a]\r\nb = c", "[a]\r\nb = 1\x0c2\r\n"]
)
def test_line_ends_stay(init: Init, text: str) -> None:
    path = Path(".torchxconfig")
    path.write_bytes(text.encode())
    assert init("--force")[0] == 0
    written = path.read_bytes().decode()
    assert written.count("\n") == written.count("\r\n") and written.count("\x0c") == text.count("\x0c")
    assert written.count("scheduler = monarch_local\r\n") == 2 and "slurm" not in written


def test_another_default_stays_unless_forced(init: Init) -> None:
    path = Path(".torchxconfig")
    text = "[cli:run]\nscheduler: slurm\nworkspace = .\n"
    path.write_text(text)
    code, out, err = init()
    assert code == 64 and out == "" and "[cli:run] scheduler = slurm" in err and "--force" in err
    assert path.read_text() == text
    assert init("--force")[0] == 0
    assert path.read_text() == text.replace("scheduler: slurm", "scheduler = monarch_local") + NEW[NEW.index("\n[") :]


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
    assert code == 64 and "cannot read" in err


def test_files_that_come_first_are_named(init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".torchxconfig").write_text("[cli:run]\nscheduler = slurm\n")
    code, _, err = init()
    assert code == 0 and f"{home}/.torchxconfig comes first for TorchX, and names slurm" in err
    monkeypatch.setenv("TORCHXCONFIG", str(home / ".torchxconfig"))
    assert "comes first for TorchX (TORCHXCONFIG), and names slurm" in init()[2]


def test_the_old_value_goes_with_its_continuation_lines() -> None:
    assert with_value("[a]\nk = 1\n  more\n\tyet\nkk = 4\n", "a", "k", "new") == "[a]\nk = new\nkk = 4\n"


@given(
    st.lists(st.sampled_from(["[a]", "[b]", "[DEFAULT]", "k = 1", "k: 2", "  more", "# k = 3", "", "kk = 4", " k=5"]))
)
def test_only_the_value_changes(lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        changed = with_value(text, "a", "k", "new")
    except ConfigSyntaxError:
        return
    assert value_of(changed, "a", "k") == "new"
    for section, key in (("b", "k"), ("b", "kk"), ("a", "kk"), ("DEFAULT", "k")):
        assert value_of(changed, section, key) == value_of(text, section, key)
    assert changed.count("#") == text.count("#")
    assert with_value(changed, "a", "k", "new") == changed
