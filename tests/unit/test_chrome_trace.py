# SPDX-License-Identifier: BSD-3-Clause
"""A trace fits the trace event format, with what Perfetto needs of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.test_timeline import RESTARTED
from torchx_monarch.cli.trace import trace
from torchx_monarch.insight.timeline import build

FIELDS: dict[str, set[str]] = {"X": {"dur", "cat"}, "i": {"s", "cat"}, "M": set()}
"""What each kind of event (a span, a moment, a name or place in the order) has beside its name, place and time."""


def check(written: dict[str, Any]) -> None:
    """Events have the fields of their kind, their tracks are named, and spans of a track are nested."""
    events = json.loads(json.dumps(written))["traceEvents"]
    for shown in events:
        assert {*shown, "args"} == {"name", "ph", "pid", "tid", "ts", "args"} | FIELDS[shown["ph"]]
        assert all(
            isinstance(shown.get(name, 0), int) and shown.get(name, 0) >= 0 for name in ("pid", "tid", "ts", "dur")
        )
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shown in events:
        if shown["ph"] in "Xi":
            assert (shown["pid"], shown["tid"]) in named
        if shown["ph"] == "X":
            tracks.setdefault((shown["pid"], shown["tid"]), []).append((shown["ts"], shown["ts"] + shown["dur"]))
    for spans in tracks.values():
        around: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


def test_a_trace_fits_the_format() -> None:
    timeline = build(RESTARTED, ["t"], end=999.0)
    written = trace(timeline, "t")
    check(written)
    events = written["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "job t",
        "host t/0",
        "host t/1",
    }
    whole = next(event["dur"] for event in events if event.get("cat") == "role")
    assert sum(event["dur"] for event in events if event.get("cat") == "phase") == pytest.approx(whole, rel=0.02)
