# SPDX-License-Identifier: BSD-3-Clause
"""The JSON text in which a host reports how it has ended, and texts that only look like one."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchx_monarch.model.host_result import HostResult, no_retry_reason
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.system import error_files

EVERY = HostResult(3, "why", "Traceback\n\tx", 17.0, True, 2, 4, "not again", 1, 18.5)
FIELDS = st.sampled_from([*error_files._SHORT, "message", "extraInfo", "py_callstack", "other"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)


def test_torchx_and_torchrun_can_read_it() -> None:
    read = json.loads(EVERY.to_text())
    assert read["message"]["message"] == "why" and read["message"]["errorCode"] == 3
    assert read["message"]["extraInfo"]["py_callstack"] == "Traceback\n\tx"
    assert read["message"]["extraInfo"]["timestamp"] == "17"
    substitute = HostResult(3, "replica r/0 exited with code 3", failed_at=17.0, is_short=True)
    flat = {"message": "replica r/0 exited with code 3", "errorCode": 3, "timestamp": 17}
    assert json.loads(substitute.to_text()) == flat
    assert HostResult.from_text(substitute.to_text()) == substitute
    assert HostResult.from_text(EVERY.to_text()) == EVERY
    assert EVERY.names_cause and not substitute.names_cause


def test_a_host_that_runs_reports_counts_alone() -> None:
    for result in (HostResult(rank_restarts=2), HostResult(restarts=0)):
        assert "message" not in json.loads(result.to_text())
        read = HostResult.from_text(result.to_text())
        assert read == result and not read.forbids_restart and not read.names_cause


@given(VALUES)
def test_any_json_is_read(data: Any) -> None:
    result = HostResult.from_text(json.dumps(data))
    assert HostResult.from_text(result.to_text()).to_text() == result.to_text()
    assert result.code is None or abs(result.code) < 256
    assert result.rank_restarts >= 0 and result.replica >= -1


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "7", "null", '"x"', "[" * 5000, '{"message":' * 5000, "last words"]
)
def test_an_unreadable_text_is_an_empty_result(text: str | None) -> None:
    assert HostResult.from_text(text) == HostResult()


@pytest.mark.parametrize(
    "values",
    [
        {"message": {"errorCode": True}, "rank_restarts": "1", "final": 3, "restarts": None, "ended": "soon"},
        {"message": {"errorCode": 10**9, "extraInfo": []}, "rank_restarts": -1, "ended": -5},
        {"message": {"message": 3, "extraInfo": {"replica": 1.5, "consequence": 1, "timestamp": "x"}}, "ended": 1e300},
        {"message": {"extraInfo": {"timestamp": "nan", "replica": "0"}}, "rank_restarts": True},
    ],
)
def test_a_field_of_another_type_counts_as_missing(values: dict[str, Any]) -> None:
    assert HostResult.from_text(json.dumps(values)) == HostResult()


def test_a_result_fits_its_limit() -> None:
    error = {"message": {"message": "x" * 3000, "extraInfo": {"py_callstack": "begin" + "\U0001f600" * 9000 + "end"}}}
    cause = RankExit(0, 0, 0, "n", 1, 1, time.time(), error=error)
    text = HostResult.from_job_result(JobResult(1, cause.describe(), cause)).to_text(4096)
    assert len(text) <= 4096
    read = json.loads(text)["message"]
    assert read["message"] == cause.describe()
    assert read["extraInfo"]["py_callstack"].endswith("end")
    long = HostResult(1, "y" * 9000, no_retry_reason="not again")
    assert len(long.to_text(4096)) <= 4096
    assert HostResult.from_text(long.to_text(4096)).no_retry_reason == "not again"
    assert json.loads(long.to_text())["message"]["message"] == "y" * 9000


def test_the_result_of_the_job_is_that_of_its_hosts() -> None:
    cause = RankExit(2, 0, 1, "n", 9, -11, 5.0)
    result = HostResult.from_job_result(
        JobResult(139, cause.describe(), cause), rank_restarts=2, no_retry_reason="not again"
    )
    assert (result.code, result.replica, result.failed_at, result.rank_restarts) == (139, 1, 5.0, 2)
    assert result.forbids_restart
    assert HostResult.from_job_result(JobResult(1, "lost", consequence=True, replica=0)).is_secondary


def test_why_a_host_is_not_restarted() -> None:
    assert no_retry_reason(3, None) == no_retry_reason(3, "garbage") == ""
    assert no_retry_reason(3, EVERY.to_text()) == "not again"
    assert "EX_CONFIG" in no_retry_reason(78, None)
