# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch doctor`` and its checks; ``init``, what it writes into a .torchxconfig, and what it leaves alone."""

from __future__ import annotations

import argparse
import gc
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from torchx.runner import config

from torchx_monarch.backends.core.backend import CheckResult
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import doctor, exit_codes, main


def test_a_result_is_a_line() -> None:
    assert CheckResult("disk", "/x, 3 MiB free", advice="full").line() == "fail  disk: /x, 3 MiB free; full"
    assert CheckResult("disk", "/x").line() == "ok    disk: /x"


# -- installation ------------------------------------------------------------------------------------------------------


def test_packages_that_are_missing_or_too_many_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {result.level for result in doctor.check_installation()} == {"ok"}
    monkeypatch.setattr(doctor, "installed_version", lambda name: {"torchx": "0.7.0"}.get(name, ""))
    found = {result.what: result for result in doctor.check_installation()}
    assert found["torchx"].level == "fail"
    assert (found["torchmonarch"].level, found["torchmonarch"].advice) == ("fail", "run: pip install torchmonarch")


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_group_that_raises_or_hangs_is_a_failed_check() -> None:
    release = threading.Event()

    def hangs() -> Iterable[CheckResult]:
        yield CheckResult("first", "1")
        release.wait(60)

    def raises() -> Iterable[CheckResult]:
        yield CheckResult("second", "2")
        raise SystemExit("torchx is too old")

    try:
        groups = doctor.run_groups({"slow": hangs, "broken": raises}, 2.0)
    finally:
        release.set()
    assert groups["slow"][0] == [CheckResult("first", "1")] and groups["slow"][1].startswith("no answer in 2 s")
    assert groups["broken"] == ([CheckResult("second", "2")], "torchx is too old")


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any cluster or daemon."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHXCONFIG", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nosuch"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nosuch")
    return tmp_path


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    main.add_arguments("doctor", parser)
    try:
        doctor.run(parser.parse_args(words))
    except SystemExit as error:
        return int(str(error.code))
    return 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-s monarch_docker", "fail  monarch_docker: there is no Docker daemon"),
        ("-s monarch_kubernetes", "fail  monarch_kubernetes: no Kubernetes cluster is configured"),
        ("-s monarch_lokal", "fail  monarch_lokal: there is no scheduler monarch_lokal. Did you mean monarch_local?"),
        ("-s local_cwd", "fail  local_cwd: local_cwd is a scheduler of another package"),
        ("-s monarch_local -cfg lease=0", "fail  monarch_local: Run option `lease` is 0; "),
        ("-s monarch_local -cfg leas=1", "fail  monarch_local: Unknown run option `leas`. Did you mean lease?"),
        ("-s monarch_local -cfg =,=", "fail  monarch_local: "),
        ("-s monarch_aws_batch", "fail  monarch_aws_batch: Required run option: queue"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    words: str, line: str, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words.split()) == 1
    printed = capsys.readouterr()
    assert any(shown.startswith(line) for shown in printed.out.splitlines()), printed.out
    assert "Traceback" not in printed.out + printed.err
    gc.collect()  # Docker's client leaves its socket open, in a cycle that a later test would pay for


def test_unreadable_configuration(
    broken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken / "config").write_text("[monarch_local\nlease = 3\n")
    monkeypatch.setenv("TORCHXCONFIG", str(broken / "config"))
    assert run("-s", "monarch_local") == 1
    assert "fail  monarch_local: File contains no section headers" in capsys.readouterr().out


def test_options_need_a_scheduler() -> None:
    with pytest.raises(UserError, match="-cfg needs -s SCHEDULER"):
        run("-cfg", "lease=3")


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
        main.add_arguments("init", parser)
        code, error = 0, ""
        try:
            main.load("init").run(parser.parse_args(words))
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
