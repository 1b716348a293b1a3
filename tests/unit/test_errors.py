# SPDX-License-Identifier: BSD-3-Clause
"""Who began it: exits, causes and words."""

from __future__ import annotations

from typing import Any

import pytest

from torchx_monarch.model.job_result import (
    RankExit,
    describe_code,
    describe_failure,
    describe_others,
    root_cause,
    shell_code,
)


def exit_of(rank: int, code: int, at: float = 10.0, **fields: Any) -> RankExit:
    return RankExit(
        rank=rank, local_rank=rank, replica=0, hostname="node", pid=100 + rank, code=code, time=at, **fields
    )


def error(message: str, **extra: Any) -> dict[str, Any]:
    return {"message": {"message": message, "extraInfo": {"py_callstack": "Traceback ...", **extra}}}


@pytest.mark.parametrize(
    ("code", "words", "shell"),
    [
        (0, "exited with code 0", 0),
        (3, "exited with code 3", 3),
        (-9, "was killed by signal 9 (SIGKILL)", 137),
        (-40, "was killed by signal 40 (unnamed)", 168),
    ],
)
def test_codes(code: int, words: str, shell: int) -> None:
    assert (describe_code(code), shell_code(code)) == (words, shell)


def test_the_first_to_fail_is_the_cause() -> None:
    exits = [exit_of(0, 0, at=1), exit_of(1, 3, at=5), exit_of(2, -11, at=4), exit_of(3, -15, at=2, stopped_at=1)]
    assert root_cause(exits) == exits[2]
    assert root_cause(exits[:1]) is None


def test_what_we_stopped_is_no_cause_unless_it_had_failed_before() -> None:
    stopped = exit_of(0, -15, at=9, stopped_at=8)
    failed_before = exit_of(1, -15, at=9, stopped_at=8, error=error("ValueError: x", raised_at=7.5))
    failed_after = exit_of(2, 1, at=9, stopped_at=8, error=error("ValueError: x", raised_at=8.5))
    assert [rank_exit.failed for rank_exit in (stopped, failed_before, failed_after)] == [False, True, False]
    # sys.exit(3) writes no error file.
    told_before, told_after = (exit_of(0, 3, at=9, stopped_at=8, failure_reported_at=told) for told in (7.5, 8.5))
    assert (told_before.failed, told_after.failed) == (True, False)


def test_who_blames_a_peer_is_the_cause_only_when_nobody_else_is() -> None:
    blames = exit_of(0, 1, at=1, error=error("RuntimeError: Connection reset by peer"))
    culprit = exit_of(1, 1, at=2, error=error("ValueError: x"))
    assert root_cause([blames, culprit]) == culprit
    assert root_cause([blames]) == blames


def test_others_are_grouped_by_how_they_failed() -> None:
    cause = exit_of(2, 1, error=error("ValueError: x"))
    same = [exit_of(rank, 1, error=error("ValueError: x")) for rank in (3, 7, 8, 9, 11)]
    said = "RuntimeError: Connection closed by peer [127.0.0.1]:3145"
    peers = [exit_of(rank, 1, error=error(f"{said}{rank}")) for rank in (0, 1)]
    assert describe_others([*same, cause, *peers, exit_of(12, -6)], cause) == [
        "ranks 3, 7, 8 and 2 more exited with code 1: ValueError: x",
        "rank 12 was killed by signal 6 (SIGABRT)",
    ]


OF_WORKER = """ValueError: Caught ValueError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
KeyError: 5

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "data.py", line 6, in __getitem__
ValueError: bad
sample
"""
OUTPUT = "exited with code 2; last output: 0 of 4: no"


@pytest.mark.parametrize(
    ("exits", "said"),
    [
        ([exit_of(rank, 1, error=error("No module named x", began=False)) for rank in range(4)], "No module named x"),
        ([exit_of(rank, 1, error=error("ValueError: x\ny")) for rank in range(4)], r"ValueError: x\ny"),
        (
            [exit_of(rank, 1, error=error(OF_WORKER)) for rank in range(4)],
            r"ValueError: bad\nsample (in DataLoader worker process 1)",
        ),
        ([exit_of(rank, 3) for rank in range(4)], "exited with code 3"),
        ([exit_of(rank, 2, last_output=f"{rank} of 4: no") for rank in range(4)], OUTPUT),
    ],
)
def test_ranks_that_fail_alike_are_one_cause(exits: list[RankExit], said: str) -> None:
    cause = root_cause(exits)
    assert cause == exits[0]
    assert describe_failure(exits, cause, 4) == f"all 4 ranks: {said}"
    assert describe_others(exits, cause) == []


def test_ranks_that_have_not_failed_are_left_out() -> None:
    exits = [exit_of(rank, 1, error=error("x")) for rank in range(3)]
    exits += [exit_of(3, -15, at=12, stopped_at=11), exit_of(4, 0)]
    assert describe_failure(exits, exits[0], 5) == "ranks 0, 1 and 2 of 5: x"
    assert describe_failure([*exits[1:2], *exits[3:]], exits[1], 5) == exits[1].describe()
    assert describe_others(exits, exits[0]) == []


@pytest.mark.parametrize(
    "last",
    [
        exit_of(3, 2, error=error("x")),
        exit_of(3, 1, error=error("y")),
        exit_of(3, 1, error=error("Broken pipe")),
    ],
)
def test_ranks_that_fail_differently_are_no_single_cause(last: RankExit) -> None:
    exits = [*(exit_of(rank, 1, error=error("x")) for rank in range(3)), last]
    assert describe_failure(exits, exits[0], 4) == exits[0].describe()
    assert describe_others(exits, exits[0])
    assert describe_failure(exits[:1], exits[0], 1) == exits[0].describe()


def test_the_last_output_is_shown_where_nothing_else_tells_why() -> None:
    assert exit_of(0, 2, last_output="0 of 4: no").describe() == f"rank 0 (local rank 0 on node, pid 100) {OUTPUT}"
