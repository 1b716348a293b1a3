# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch doctor``: its checks of what is installed, of the configuration and of schedulers."""

from __future__ import annotations

import argparse
import gc
import json
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torchx_monarch.cli import doctor as command
from torchx_monarch.model.check_result import CheckResult, check
from torchx_monarch.schedulers import doctor, install_checks


def levels(results: Iterable[CheckResult]) -> dict[str, str]:
    return {result.what: result.level for result in results}


def test_a_result_is_a_line() -> None:
    assert check("disk", "/x, 3 MiB free", fail="full").line() == "fail  disk: /x, 3 MiB free; full"
    assert check("disk", "/x").line() == "ok    disk: /x"


# -- installation ------------------------------------------------------------------------------------------------------


def test_requirements_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_checks.check_requirement(Requirement("torch>=2.4")).level == "ok"
    missing = install_checks.check_requirement(Requirement("no-such-package<4,>=3"))
    assert (missing.level, missing.advice) == ("fail", "run: pip install 'no-such-package<4,>=3'")
    old = install_checks.check_requirement(Requirement("torch>=999"))
    assert old.level == "fail" and "needs >=999" in old.advice
    assert install_checks.check_extra("docker") == []
    monkeypatch.setattr(install_checks, "_version", lambda name: {"torchx": "0.7.0"}.get(name))
    found = levels(install_checks.check_installation())
    assert found["torchx"] == found["torchmonarch"] == "fail"


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_group_that_raises_or_hangs_is_a_failed_check() -> None:
    release = threading.Event()

    def hangs() -> Iterable[CheckResult]:
        yield check("first", "1")
        release.wait(60)

    def raises() -> Iterable[CheckResult]:
        yield check("second", "2")
        raise SystemExit("torchx is too old")

    try:
        groups = doctor.run_groups({"slow": hangs, "broken": raises}, 2.0)
    finally:
        release.set()
    assert groups["slow"][0] == [check("first", "1")] and groups["slow"][1].startswith("no answer in 2 s")
    assert groups["broken"] == ([check("second", "2")], "torchx is too old")


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
    command.add_arguments(parser)
    try:
        command.run(parser.parse_args(words))
    except SystemExit as error:
        return int(str(error.code))
    return 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-s monarch_docker", "fail  monarch_docker: there is no Docker daemon"),
        ("-s monarch_kubernetes", "fail  monarch_kubernetes: no Kubernetes cluster is configured"),
        ("-s monarch_lokal", "fail  scheduler: monarch_lokal; there is none of this name. Did you mean monarch_local?"),
        ("-s local_cwd", "fail  scheduler: local_cwd; it is of another package"),
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


def test_schedulers_that_cannot_be_used_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nosuch")
    monkeypatch.setattr(doctor, "registered", lambda: ["acme_local", "monarch_docker"])
    missing = {
        "acme_local": check("scheduler", "", fail="foreign"),
        "monarch_docker": check("docker", "", fail="missing"),
    }
    monkeypatch.setattr(doctor, "_create", lambda name: (None, missing[name]))
    assert run("--json") == 0
    found = {result["what"]: result for result in json.loads(capsys.readouterr().out)}
    assert found["monarch_docker"]["level"] == "warn" and "acme_local" not in found
    assert found["monarch_docker"]["advice"] == "cannot be used: missing"


def test_options_need_a_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-cfg", "lease=3") == 64
    assert "needs -s" in capsys.readouterr().err
