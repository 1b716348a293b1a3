# SPDX-License-Identifier: BSD-3-Clause
"""The page about a job loads nothing, and shows texts of ranks as texts; the files that it is made from."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.test_timeline import HOSTS, LIVE, RESTARTED, ROLE, START, event
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli.output import write_output
from torchx_monarch.cli.report import read_stacks
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.report_page import render, rows_of, shares, ticks
from torchx_monarch.insight.timeline import Timeline, build

HOSTILE = "<script>alert(1)</script>\"'><img src=http://x/y onerror=alert(2)>{{ page }}</style>"


def page(timeline: Timeline) -> str:
    texts = dict.fromkeys(("name", "handle", "state", "headline", "cause", "traceback", "log", "written"), HOSTILE)
    values: dict[str, object] = {
        **texts,
        "facts": [(HOSTILE, HOSTILE)],
        "rows": rows_of(timeline),
        "ticks": ticks(timeline.job.seconds),
        "roles": [{"name": HOSTILE, "lost": HOSTILE, "shares": shares(timeline, "t")}],
        "runs": timeline.spans_of("run"),
        "moments": timeline.moments,
        "ranks": timeline.spans_of("rank"),
        "ranks_left_out": 0,
        "stacks": [(HOSTILE, HOSTILE)],
    }
    return render(values, timeline.job)


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data", "xlink:href")]


@pytest.mark.parametrize(
    "happened",
    [
        [],
        START,
        [{**event, "message": HOSTILE} for event in RESTARTED],
        [
            *START,
            event(105, "run", run=1, message=HOSTILE),
            event(106, "ranks", hosts=HOSTS),
            event(107, "run_end", run=1),
        ],
    ],
)
def test_texts_of_ranks_are_texts(happened: list[Event]) -> None:
    text = page(build(happened, ROLE, start=99.0, end=130.0))
    elements = Elements(text)
    assert not elements.names & {"script", "img", "iframe", "object", "embed", "base", "form"}
    assert elements.links == ["data:,"]
    assert not [name for name in elements.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)" in text and "{{ page }}" in text
    assert text.count("</style>") == 1 and "url(" not in text and "@import" not in text


def test_the_picture_has_a_row_for_each_rank_and_folds_many_by_host() -> None:
    restarted = build(RESTARTED, ROLE, end=999.0)
    rows = rows_of(restarted)
    assert [row.label for row in rows] == ["phases", "attempts", "rank 0", "rank 1", "rank 2"]
    assert [style for _, style in rows[3].bars] == ["import", "failed", "running"]
    assert [style for _, style in rows[4].bars] == ["stopped", "running"]
    assert [moment.kind for moment in rows[0].marks] == ["failure"]
    text = page(restarted)
    assert 'aria-label="phases: submit: 0.5 s from 0.0 s; queued: 0.5 s from 0.5 s;' in text
    assert "<title>rank 1, exit code 1, process group after 1.4 s: 3.9 s from 6.1 s</title>" in text
    many = [{"replica": replica, "first_rank": 4 * replica, "pids": [1, 2, 3, 4]} for replica in range(300)]
    drawn = build([*START, event(106, "ranks", hosts=many)], ROLE, end=130.0)
    assert rows_of(drawn)[1].label == "host 0" and "45 more rows are left out" in page(drawn)


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (0.0, ["0 s"]),
        (7.6, ["0 s", "1 s", "2 s", "3 s", "4 s", "5 s", "6 s", "7 s"]),
        (130.0, ["0 s", "30 s", "1:00 min", "1:30 min", "2:00 min"]),
        (7200.0, ["0 s", "30:00 min", "1:00 h", "1:30 h", "2:00 h"]),
        (864000.0, None),
    ],
)
def test_the_axis_has_round_times(seconds: float, labels: list[str] | None) -> None:
    timeline = build([], ROLE, start=100.0, end=100.0 + seconds)
    shown = re.findall(r'<text x="([\d.]+)%".*>(.*)</text>', page(timeline))
    assert labels is None or [label for _, label in shown] == labels
    assert len(shown) <= 10 and all(0 <= float(left) <= 100 for left, _ in shown)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_stacks_are_found(tmp_path: Path) -> None:
    timeline = build(RESTARTED, ROLE, end=999.0)
    write(tmp_path / "t/0/attempt_0/stacks.txt", b"old")
    assert read_stacks(str(tmp_path), timeline) == [("t/0/attempt_0/stacks.txt", "old")]
    write(tmp_path / "t/0/attempt_1/stacks.txt", b"new\x1b[2J\n  here\xff")
    (tmp_path / "t/1/attempt_1").mkdir(parents=True)
    (tmp_path / "t/1/attempt_1/stacks.txt").symlink_to("/etc/passwd")
    assert read_stacks(str(tmp_path), timeline) == [("t/0/attempt_1/stacks.txt", "new\\x1b[2J\n  here\ufffd")]
    run = build([*START, event(105, "run", run=1), event(106, "ranks", hosts=HOSTS)], LIVE, end=130.0)
    write(tmp_path / "t/0/run_1/attempt_0/stacks.txt", b"of a run")
    assert read_stacks(str(tmp_path), run) == [("t/0/run_1/attempt_0/stacks.txt", "of a run")]
    again = build([*START, event(106, "ranks", attempt=0, log_attempt=1, hosts=HOSTS)], ROLE, end=130.0)
    assert read_stacks(str(tmp_path), again) == [("t/0/attempt_1/stacks.txt", "new\\x1b[2J\n  here\ufffd")]
    assert read_stacks(None, timeline) == []


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    write_output(str(tmp_path / "job.html"), "a\udcff")  # a name that is no UTF-8
    assert (tmp_path / "job.html").read_text() == r"a\udcff"
    for name in ("", "no/folder"):
        with pytest.raises(UserError, match="cannot write"):
            write_output(str(tmp_path / name), "two")


def test_a_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-", "/dev/stdout"):
        write_output(name, "a\udcff")
        assert capsys.readouterr().out == r"a\udcff"
    assert not os.listdir()
