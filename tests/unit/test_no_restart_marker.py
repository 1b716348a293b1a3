# SPDX-License-Identifier: BSD-3-Clause
"""What a host notes for its next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchx_monarch.controller.retry import why_no_other_start
from torchx_monarch.host import no_restart_marker
from torchx_monarch.host.no_restart_marker import VARIABLE, NoRestartMarker
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import JobResult, RankExit

CAUSE = RankExit(rank=1, local_rank=0, replica=1, hostname="n", pid=9, code=3, time=5.0)
FAILED = HostResult.from_job_result(JobResult(3, "rank 1 failed", CAUSE), no_retry_reason="no use")
LOST = HostResult.from_job_result(JobResult(1, "lost"))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on no mount, wherever this machine has its /tmp."""
    monkeypatch.setattr(no_restart_marker, "_mounts", lambda: {"/", str(tmp_path / "shared")})
    return tmp_path


def test_ends_are_known_at_the_next_start(own: Path) -> None:
    environ = {VARIABLE: f"{own}/shared/note:{own}/new/note"}
    for _ in range(2):
        host = NoRestartMarker(environ)
        assert host.begin() is None
        assert host.end(LOST)
    assert host.end(FAILED)
    for _ in range(2):
        again = NoRestartMarker(environ)
        stored = again.begin()
        assert stored == replace(FAILED, failed_at=5.0, restarts=1)
        assert again.end(stored)
    assert not (own / "shared").exists()
    assert not (own / "shared").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"restarts": "x"}', '{"restarts": 0, "message": 1, "final": "w"}'])
def test_what_is_no_note_is_none(own: Path, text: str) -> None:
    (own / "note").write_text(text)
    assert NoRestartMarker({VARIABLE: f"{own}/note"}).begin() is None


def test_where_nothing_can_be_noted(own: Path) -> None:
    (own / "file").write_text("")
    host = NoRestartMarker({VARIABLE: f"{own}/file/note"})
    assert host.begin() is None
    assert host.end(LOST)
    assert not host.end(FAILED)
    assert NoRestartMarker({}).begin() is None
    assert NoRestartMarker({}).end(FAILED)


@pytest.mark.parametrize(
    ("result", "retry_on", "reason"),
    [
        (JobResult(78, "", CAUSE), (), "EX_CONFIG"),
        (JobResult(3, "", CAUSE), (1, 137), "is not one of 1, 137"),
        (JobResult(3, "", CAUSE), (3,), ""),
        (JobResult(0, ""), (1,), ""),
        (JobResult(1, "a host was lost"), (3,), ""),
    ],
)
def test_programs_decide_and_not_what_befalls_hosts(result: JobResult, retry_on: tuple[int, ...], reason: str) -> None:
    assert reason in why_no_other_start(result, retry_on)
    assert bool(reason) == bool(why_no_other_start(result, retry_on))
