# SPDX-License-Identifier: BSD-3-Clause
"""Events become phases without gaps, attempts, runs and ranks, and a page; what ranks write there does no harm."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from docs.tools import browser
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli.output import write_output
from torchx_monarch.cli.report import read_stacks
from torchx_monarch.insight import events
from torchx_monarch.insight.account import lost_seconds
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.report_page import legend, render, rows_of, shares, ticks
from torchx_monarch.insight.timeline import Timeline, build
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind

ROLE = [RoleSpec("t", workload=WorkloadKind.RANKS)]
LIVE = [RoleSpec("t", workload=WorkloadKind.ALLOCATION)]
HOSTS: list[dict[str, Any]] = [
    {"replica": 0, "name": "a", "first_rank": 0, "pids": [7, 8], "imported": [101.0, 105.0]},
    {"replica": 1, "name": "b", "first_rank": 2, "pids": [9], "imported": []},
]
EXITS = [
    {"rank": 1, "code": 1, "started": 106.1, "ended": 110.0, "secondary": False, "grouped": 107.5},
    {"rank": 2, "code": -15, "started": 106.1, "ended": 110.5, "secondary": True},
]


def event(time: float, kind: str, **fields: Any) -> Event:
    return {"time": time, "kind": kind, "message": fields.pop("message", kind), **fields}


START = [event(100.5, "submitted", seconds=0.5), event(101, "supervised"), event(103, "hosts")]
RESTARTED = [
    *START,
    event(106, "ranks", attempt=0, role="t", hosts=HOSTS),
    event(107, "output"),
    event(110.5, "attempt_end", attempt=0, exits=EXITS),
    event(110.6, "failure", failed_at=110.0),
    event(110.7, "rank_restart", attempt=1),
    event(111, "ranks", attempt=1, hosts=HOSTS),
    event(120, "result", code=0),
    event(121, "ended"),
]


def phases(timeline: Timeline, role: str = "t") -> list[tuple[str, float]]:
    return [(span.name, round(span.end, 3)) for span in timeline.spans_of("phase", role)]


def check(timeline: Timeline) -> None:
    """Phases add up, and every span lies within its parent."""
    for role in timeline.spans_of("role"):
        of_role = timeline.spans_of("phase", role.name)
        assert sum(span.seconds for span in of_role) == pytest.approx(timeline.job.seconds)
        assert all(phase.end == next_one.start for phase, next_one in zip(of_role, of_role[1:], strict=False))
    for span in timeline.spans:
        assert timeline.job.start <= span.start <= span.end <= timeline.job.end
        if span.parent is not None:
            assert span.parent.start <= span.start and span.end <= span.parent.end


def test_a_job_with_a_restart() -> None:
    timeline = build(RESTARTED, ROLE, end=999.0)
    check(timeline)
    assert (timeline.job.start, timeline.job.end) == (100.0, 121.0)
    assert phases(timeline) == [
        *(("submit", 100.5), ("queued", 101), ("hosts", 103), ("ranks", 106), ("first output", 107)),
        *(("running", 110), ("stopping", 110.7), ("ranks", 111), ("running", 120), ("end", 121)),
    ]
    attempts = timeline.spans_of("attempt")
    assert [(attempt.name, attempt.start, attempt.end) for attempt in attempts] == [
        ("attempt 1", 103, 110.7),
        ("attempt 2", 110.7, 120),
    ]
    ranks = [
        (span.number, span.replica, span.pid, span.code, span.start, span.end) for span in timeline.spans_of("rank")
    ]
    assert ranks[:2] == [(0, 0, 7, None, 106, 110.7), (1, 0, 8, 1, 106.1, 110.0)] and len(ranks) == 6
    assert [span.grouped for span in timeline.spans_of("rank")[:3]] == [None, 107.5, None]
    assert [(span.replica, span.start, span.end) for span in timeline.spans_of("import")] == [(0, 101.0, 105.0)]
    assert [moment.kind for moment in timeline.moments] == ["output", "failure", "rank_restart", "result", "ended"]


def test_lost_time_is_that_of_the_outages() -> None:
    lost = lost_seconds(build(RESTARTED, ROLE, end=999.0), "t")
    assert lost == pytest.approx({"queue": 1.0, "launch": 5.0, "restart": 1.0, "hang": 0.0})
    requeued = [
        *RESTARTED[:6],
        event(110, "failure"),
        event(112, "requeue"),
        event(150, "job_started"),
        event(151, "hosts"),
        event(160, "ranks"),
    ]
    lost = lost_seconds(build(requeued, ROLE, end=170.0), "t")
    assert lost == pytest.approx({"queue": 1.0, "launch": 5.0, "restart": 50.0, "hang": 0.0})


def test_a_hang_begins_when_ranks_begin_to_wait() -> None:
    hangs = [
        event(115, "hang", waited=5.0, ranks="1"),
        event(116, "hang", waited=1e12),
        event(118, "hang_end", waited=8.0),
    ]
    happened = [*RESTARTED[:6], *hangs, event(120, "hang"), event(121, "failure", failed_at=120.5)]
    timeline = build(happened, ROLE, end=122.0)
    check(timeline)
    shown = [("running", 110), ("hang", 118), ("running", 120), ("hang", 120.5), ("stopping", 122)]
    assert [style for _, style in rows_of(timeline)[2].bars] == ["ranks", "failed", "hang"]  # of rank 1
    assert ("hang", "hang, also of the rank that others wait for") in legend(rows_of(timeline))
    assert phases(timeline)[-5:] == shown
    assert lost_seconds(timeline, "t")["hang"] == pytest.approx(8.5)


@pytest.mark.parametrize(
    ("more", "last"),
    [
        ([], ("queued", 130)),
        (START[1:2], ("hosts", 130)),
        (START[1:3], ("ranks", 130)),
        ([*START[1:], event(106, "ranks")], ("running", 130)),
        ([*START[1:], event(106, "ranks"), event(107, "failure")], ("stopping", 130)),
        ([*START[1:], event(106, "ranks"), event(107, "failure"), event(108, "replacement")], ("hosts", 130)),
    ],
)
def test_a_job_that_runs_ends_now(more: list[Event], last: tuple[str, float]) -> None:
    timeline = build([START[0], *more], ROLE, end=130.0)
    check(timeline)
    assert phases(timeline)[-1] == last


def test_runs_of_a_live_allocation() -> None:
    happened = [
        *START,
        event(110, "run", run=1, message="run 1: torchrun t.py"),
        event(111, "ranks", attempt=0),
        event(115, "failure"),
        event(116, "rank_restart", attempt=1),
        event(117, "ranks", attempt=1),
        event(118, "run_end", run=1, code=3),
        event(120, "run", run=2),
        event(121, "ranks", attempt=0),
    ]
    timeline = build(happened, LIVE, end=125.0)
    check(timeline)
    runs = [(span.number, span.start, span.end, span.code) for span in timeline.spans_of("run")]
    assert runs == [(1, 110, 118, 3), (2, 120, 125, None)]
    assert [span.name for span in timeline.spans_of("attempt")] == ["attempt 1", "attempt 2", "attempt 1"]
    assert [span.parent.number for span in timeline.spans_of("attempt") if span.parent] == [1, 1, 2]
    assert ("ready", 110) in phases(timeline) and ("ready", 120) in phases(timeline)
    assert phases(build(START, LIVE, end=125.0))[-1] == ("ready", 125)


def test_roles_have_phases_of_their_own() -> None:
    happened = [
        *START[:2],
        event(103, "hosts", role="a"),
        event(105, "hosts", role="b"),
        event(110, "restart", role="b"),
        event(111, "ended"),
    ]
    timeline = build(happened, [RoleSpec(name, workload=WorkloadKind.RANKS) for name in "ab"], end=111.0)
    check(timeline)
    assert phases(timeline, "a") == [("submit", 100.5), ("queued", 101), ("hosts", 103), ("ranks", 111)]
    assert phases(timeline, "b")[-2:] == [("ranks", 110), ("hosts", 111)]


def test_nothing_is_known() -> None:
    assert phases(build([], ROLE, start=5.0, end=9.0)) == [("queued", 9.0)]
    check(build([], [], end=9.0))
    check(build([], ROLE, end=9.0))


def test_an_end_in_whole_seconds_cuts_off_no_phase() -> None:
    happened = [*START, event(104.6, "ranks"), event(104.9, "failure")]
    timeline = build(happened, ROLE, end=104.0)
    check(timeline)
    assert timeline.job.end == 104.9 and phases(timeline)[-2:] == [("ranks", 104.6), ("running", 104.9)]


@pytest.mark.parametrize(
    "hostile",
    [
        {"hosts": "no list"},
        {"hosts": [1, None, {"replica": True}, {"replica": 0, "pids": 3, "imported": ["a", 1]}]},
        {"hosts": [{"replica": 0, "pids": ["x", None, 1 << 80], "first_rank": "y", "imported": [1e300, 5, 7]}]},
        {"hosts": [{"replica": 0, "pids": [1], "imported": [-5, 1e10]}], "attempt": "1"},
        {"attempt": 1 << 90, "role": ["t"]},
        {"time": 1e10},
        {"time": -1e10},
    ],
)
def test_fields_of_a_wrong_type_are_ignored(hostile: dict[str, Any], tmp_path: Path) -> None:
    wrong = [{"rank": "0"}, 5, {"rank": 0, "code": "x", "started": None, "ended": "now"}, {"rank": 99}]
    wrong += [{"rank": 1, "code": 0, "started": 106, "ended": 107, "grouped": formed} for formed in ("x", 1e300)]
    happened = [
        *START,
        {**event(106, "ranks", role="t", hosts=HOSTS), **hostile},
        event(107, "attempt_end", role="t", exits=wrong),
        event(107, "failure", failed_at="x"),
        event(108, "run", run="1"),
        event(109, "run_end", run={}),
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{json.dumps(written)}\n" for written in happened))
    check(build(events.read(path)[0], ROLE, end=130.0))


HOSTILE = "<script>alert(1)</script>\"'><img src=http://x/y onerror=alert(2)>{{ page }}</style>"


def page(timeline: Timeline) -> str:
    texts = dict.fromkeys(("name", "handle", "state", "headline", "cause", "traceback", "log", "written"), HOSTILE)
    values: dict[str, object] = {
        **texts,
        "facts": [(HOSTILE, HOSTILE)],
        "rows": (rows := rows_of(timeline)),
        "legend": legend(rows),
        "ticks": ticks(timeline.job.seconds),
        "roles": [{"name": HOSTILE, "lost": HOSTILE, "shares": shares(timeline, "t")}],
        "runs": timeline.spans_of("run"),
        "moments": timeline.moments,
        "ranks": timeline.spans_of("rank"),
        "ranks_left_out": 0,
        "stacks": [(HOSTILE, HOSTILE)],
        "curves": [],
        "activity": [],
        "live": "",
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
    assert [style for _, style in rows[3].bars] == ["ranks", "failed", "running"]
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


def test_the_axis_has_room_on_a_phone(tmp_path: Path) -> None:
    if (path := browser.find()) is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    places = "[...document.querySelectorAll('.axis text')].map(text => text.getBoundingClientRect())"
    beside = "places.filter(({width}) => width).every(({right}, at, all) => !all[at + 1] || right < all[at + 1].left)"
    drawn = tmp_path / "page.html"
    with browser.started(path) as opened:
        for seconds in (7.6, 239.0, 895.0, 28000.0):
            drawn.write_text(page(build(START, ROLE, end=100.0 + seconds)))
            opened.open(drawn, 390, 800)
            assert opened.evaluate(f"(places => {beside})({places})"), seconds


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
