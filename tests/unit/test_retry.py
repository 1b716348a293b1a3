# SPDX-License-Identifier: BSD-3-Clause
"""When ranks are started again, the exit codes that say so, and what a host notes for its next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchx_monarch.controller.attempts import SameStep, why_no_restart
from torchx_monarch.controller.members import Attempt
from torchx_monarch.host import no_restart_marker
from torchx_monarch.host.no_restart_marker import VARIABLE, NoRestartMarker
from torchx_monarch.model.backoff import Backoff
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.host_spec import HostSpec, parse_exit_codes
from torchx_monarch.model.job_result import JobResult, RankExit, StepsDone


def failed(rank: int = 0, code: int = 1, **extra: object) -> RankExit:
    error = {"message": {"message": "boom", "extraInfo": extra}} if extra else None
    return RankExit(rank, rank, 0, "node", 100 + rank, code, 1.0, error=error)


def at_step(rank: int, step: int | None) -> RankExit:
    return replace(failed(rank), steps=None if step is None else StepsDone(0, step, 0.0, 1.0))


@pytest.mark.parametrize(
    ("cause", "retry_on", "reason"),
    [
        (failed(code=1), (), ""),
        (failed(code=-9), (), ""),
        (failed(code=1, began=False), (1,), "the program cannot even begin"),
        (failed(code=78), (), "exit code 78 (EX_CONFIG) asks for no restart"),
        (failed(code=-9), (137, 139), ""),
        (failed(code=137), (137, 139), ""),
        (failed(code=1), (139, 137), "exit code 1 is not one of 137, 139 (retry_on)"),
        (failed(code=-6), (1,), "exit code 134 is not one of 1 (retry_on)"),
    ],
)
def test_what_an_exit_code_says(cause: RankExit, retry_on: tuple[int, ...], reason: str) -> None:
    assert why_no_restart(cause, (), (), HostSpec(retry_on=retry_on)) == reason


@pytest.mark.parametrize(
    ("now", "before", "reason"),
    [
        ({0}, {0}, "rank 0 has failed twice in a row before it was in a process group"),
        ({0, 3}, {3, 4}, "rank 3 has failed twice in a row before it was in a process group"),
        ({0}, set(), ""),
        ({0}, {1}, ""),  # another one each time
        ({1}, {1}, ""),  # not what began it
        (set(), {0}, ""),
    ],
)
def test_a_rank_that_never_joins(now: set[int], before: set[int], reason: str) -> None:
    assert why_no_restart(failed(0), now, before, HostSpec()) == reason


def test_who_has_never_joined() -> None:
    stopped = RankExit(7, 7, 0, "node", 107, 1, 3.0, stopped_at=2.0, error=failed(7, joined=False, raised_at=2.5).error)
    exits = [failed(0), failed(1, joined=False), failed(2, joined=True), failed(3, code=-11), stopped]
    assert Attempt(exits={rank_exit.rank: rank_exit for rank_exit in exits}).never_joined == {1}


@pytest.mark.parametrize(
    ("steps", "stops_after"),
    [
        ([7, 7, 7, 7], 3),
        ([7, 6, 7], 3),  # a rank that had not reported the last step yet
        ([7, 8, 9, 10, 11], None),
        ([7, 7, 9, 9, 9], 5),
        ([7, 3, 7, 3, 7], None),
        ([None, None, None], None),
        ([7, None, 7, 7], 4),
        ([0, 0, 0], 3),
    ],
)
def test_failures_at_the_same_step(steps: list[int | None], stops_after: int | None) -> None:
    def reasons(limit: int) -> list[str]:
        same = SameStep()
        causes = [at_step(0, step) for step in steps]
        return [same.why_not([cause], cause, limit) for cause in causes]

    stopped = [number for number, reason in enumerate(reasons(3), 1) if reason]
    assert stopped[:1] == ([stops_after] if stops_after else [])
    assert not any(reasons(0))


def test_the_step_of_another_rank_counts_if_the_cause_has_reported_none() -> None:
    exits, same = [failed(0), at_step(1, 5), at_step(2, 4)], SameStep()
    assert same.why_not(exits, exits[0], 2) == ""
    assert same.why_not(exits, exits[0], 2) == "2 failures in a row at step 5, without progress (same_step_limit)"


@pytest.mark.parametrize(
    ("text", "codes"),
    [("", ()), (" ", ()), ("1", (1,)), ("SIGKILL+1,134 + 1", (1, 134, 137)), ("255,SIGSEGV", (139, 255))],
)
def test_exit_codes_are_read(text: str, codes: tuple[int, ...]) -> None:
    assert parse_exit_codes(text) == codes


@pytest.mark.parametrize("text", ["0", "256", "-1", "x", "1++2", "KILL", "1;2", "1+", "SIGNONE", "1.0", "\u0663"])
def test_what_is_no_exit_code_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="use numbers from 1 to 255 and names of signals such as SIGKILL"):
        parse_exit_codes(text)


def test_the_exit_code_that_is_never_retried_is_refused() -> None:
    with pytest.raises(ValueError, match="78 is the exit code with which a program asks not to be started again"):
        parse_exit_codes("1+78")


def test_restarts_wait_longer_and_longer_unless_the_last_attempt_has_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = Backoff()
    assert forever.delay(0.0) == 0
    assert max(forever.delay(0.0) for _ in range(2000)) <= 60
    monkeypatch.setattr("random.uniform", lambda lowest, highest: highest)
    longest = Backoff()
    assert [longest.delay(0.3) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [longest.delay(lived) for lived in (3600.0, 0.3, 0.3, 59.0, 60.0)] == [0, 1, 2, 4, 0]
    monkeypatch.setattr("random.uniform", lambda lowest, highest: lowest)
    shortest = Backoff()
    assert [shortest.delay(0.3) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]


CAUSE = RankExit(rank=1, local_rank=0, replica=1, hostname="n", pid=9, code=3, time=5.0)
FAILED = HostResult.from_job_result(JobResult(3, "rank 1 failed", CAUSE), no_retry_reason="no use")
LOST = HostResult.from_job_result(JobResult(1, "lost"))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on no mount, wherever this machine has its /tmp."""
    monkeypatch.setattr(no_restart_marker, "_mounts", lambda: {"/", str(tmp_path / "shared")})
    return tmp_path


def test_starts_are_counted_and_the_last_end_is_noted(own: Path) -> None:
    environ = {VARIABLE: f"{own}/shared/note:{own}/new/note"}
    for restarts in range(2):
        host = NoRestartMarker(environ)
        host.begin()
        assert host.restarts == restarts and host.end(LOST) is None
    assert host.end(FAILED)
    noted = HostResult.from_text((own / "new" / "note").read_text())
    assert noted == replace(FAILED, failed_at=5.0, restarts=1)
    assert not (own / "shared").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"restarts": "x"}'])
def test_what_is_no_note_is_none(own: Path, text: str) -> None:
    (own / "note").write_text(text)
    host = NoRestartMarker({VARIABLE: f"{own}/note"})
    host.begin()
    assert host.restarts == 0


def test_where_nothing_can_be_noted(own: Path) -> None:
    (own / "file").write_text("")
    host = NoRestartMarker({VARIABLE: f"{own}/file/note"})
    host.begin()
    assert host.end(LOST) is None
    assert host.end(FAILED) is False
    assert NoRestartMarker({}).end(FAILED) is None
