# SPDX-License-Identifier: BSD-3-Clause
"""The table of ``torchx monarch ls``."""

from __future__ import annotations

import pytest

from torchx_monarch.cli import ls
from torchx_monarch.schedulers.job_status import JobStatus


def job(handle: str, name: str, **more: object) -> JobStatus:
    return JobStatus(handle, name, "RUNNING", **more)  # type: ignore[arg-type]


def table(capsys: pytest.CaptureFixture[str], *jobs: JobStatus) -> list[list[str]]:
    ls._print(jobs)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_ids_tell_two_runs_of_one_name_apart(capsys: pytest.CaptureFixture[str]) -> None:
    handles = ("monarch_local://torchx/train-x7", "monarch_local://torchx/train-b9")
    head, *rows = table(capsys, *(job(handle, "train", hosts=2, ranks=8, exit_code=3) for handle in handles))
    assert head == ["ID", "STATE", "AGE", "TIME", "CODE", "HOSTS"]
    assert rows == [["train-x7", "RUNNING", "3", "2x4"], ["train-b9", "RUNNING", "3", "2x4"]]


def test_names_and_schedulers_are_shown_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = job("monarch_slurm://torchx/47", "train"), job("monarch_local://torchx/eval-x", "eval", hosts=2, ranks=3)
    head, *rows = table(capsys, *jobs)
    assert head == ["ID", "NAME", "STATE", "AGE", "TIME", "CODE", "HOSTS", "SCHEDULER"]
    assert rows[0] == ["47", "train", "RUNNING", "monarch_slurm"]
    assert rows[1] == ["eval-x", "eval", "RUNNING", "2", "with", "3", "ranks", "monarch_local"]


def test_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    ls._print([job("monarch_slurm://torchx/47", "a\x1b[31m\nb")])
    assert "a\\x1b[31m\\nb" in capsys.readouterr().out
