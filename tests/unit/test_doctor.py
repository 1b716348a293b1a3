# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch doctor``: its checks of what is installed, of the configuration and of schedulers."""

from __future__ import annotations

import argparse
import gc
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from torchx_monarch.cli import doctor
from torchx_monarch.model.check_result import CheckResult


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
    doctor.add_arguments(parser)
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


def test_options_need_a_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-cfg", "lease=3") == 64
    assert "needs -s" in capsys.readouterr().err
