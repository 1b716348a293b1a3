# SPDX-License-Identifier: BSD-3-Clause
"""Lines of several logs in the order of time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.cli.logs import LogMerge


@given(st.lists(st.lists(st.integers(0, 50)), max_size=5))
def test_lines_are_merged_by_time(logs: list[list[int]]) -> None:
    sources = {
        index: [TimedLine(float(time), f"{index} {time}") for time in sorted(times)] for index, times in enumerate(logs)
    }
    found = [each for each in LogMerge(sources, follow=False) if each is not None]
    assert [line.time for _, line in found] == sorted(time for times in logs for time in times)
    for index, lines in sources.items():
        assert [line for key, line in found if key == index] == lines


def test_a_line_without_time_stays_behind_the_one_before_it() -> None:
    first = [TimedLine(1.0, "a"), TimedLine(0.0, "b"), TimedLine(3.0, "c")]
    found = [each[1].text for each in LogMerge({"x": first, "y": [TimedLine(2.0, "d")]}, follow=False) if each]
    assert found == ["a", "b", "d", "c"]


def test_a_followed_log_that_is_silent_holds_no_other_up() -> None:
    go_on = threading.Event()

    def silent() -> Iterator[TimedLine]:
        assert go_on.wait(60)
        yield TimedLine(9.0, "late")

    lines = iter(LogMerge({"silent": silent(), "other": [TimedLine(1.0, "a"), TimedLine(2.0, "b")]}, follow=True))
    assert [next(lines), next(lines)] == [("other", TimedLine(1.0, "a")), ("other", TimedLine(2.0, "b"))]
    assert next(lines) is None
    go_on.set()
    assert [each for each in lines if each] == [("silent", TimedLine(9.0, "late"))]


def test_an_error_of_a_log_is_raised() -> None:
    def broken() -> Iterator[TimedLine]:
        yield TimedLine(1.0, "a")
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(LogMerge({"x": broken()}, follow=False))
