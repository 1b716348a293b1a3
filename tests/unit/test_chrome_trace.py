# SPDX-License-Identifier: BSD-3-Clause
"""A trace fits the trace event format, with what Perfetto needs of it; dumps of hostile ranks make no values but plain
ones."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_timeline import RESTARTED
from torchx_monarch.cli.trace import trace
from torchx_monarch.insight import recorder_dump
from torchx_monarch.insight.recorder_dump import DumpError, parse
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


def entry(number: int, called: float, **more: Any) -> dict[str, Any]:
    return {
        "profiling_name": "gloo:all_reduce",
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "input_sizes": [[2, 3], [7]],
        "time_created_ns": int(called * 1e9),
        "time_discovered_completed_ns": None,
        "state": "scheduled",
        "retired": True,
        **more,
    }


def dump(*entries: object) -> bytes:
    return pickle.dumps({"version": "2.10", "entries": list(entries)}, 2)


def test_a_trace_fits_the_format() -> None:
    timeline = build(RESTARTED, ["t"], end=999.0)
    last = entry(3, 109.0, retired=False)
    known = entry(2, 108.0, time_discovered_completed_ns=int(108.5e9), state="completed")
    found = parse(dump(entry(1, 107.0), known, last, entry(4, 1.0)))
    written = trace(timeline, "t", {timeline.spans.index(timeline.spans_of("rank")[0]): found})
    check(written)
    events = written["traceEvents"]
    collectives = [(event["ph"], event["ts"], event.get("dur")) for event in events if event.get("cat") == "collective"]
    assert collectives == [("i", 7_000_000, None), ("X", 8_000_000, 500_000), ("X", 9_000_000, 1_700_000)]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "job t",
        "host t/0",
        "host t/1",
    }
    whole = next(event["dur"] for event in events if event.get("cat") == "role")
    assert sum(event["dur"] for event in events if event.get("cat") == "phase") == pytest.approx(whole, rel=0.02)


def test_a_dump_is_read() -> None:
    found = parse(dump(entry(1, 5.0, state="completed", retired=False)))
    assert [
        (collective.name, collective.group, collective.number, collective.sizes, collective.has_completed)
        for collective in found
    ] == [("gloo:all_reduce", "0", 1, "[2, 3] [7]", True)]


class Hostile:
    """Calls a function where it is unpickled as usual."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        pickle.dumps(Hostile()),
        dump(entry(1, 5.0, profiling_name=Hostile())),
        pickle.dumps({"entries": {}}),
        pickle.dumps([]),
        dump(5),
        dump(entry(1, 5.0, profiling_name=5)),
        dump(entry(1, 5.0, collective_seq_id="5")),
        dump(entry(1, 5.0, time_created_ns=1 << 70)),
        dump(entry(1, 5.0, process_group=())),
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a bytearray of 1 TiB
        b"\x80\x02" + b"]" * 100_000,
        b"\x80\x02\x82\x01.",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # room for 2^31 memorized values
    ],
)
def test_a_hostile_dump_is_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DumpError):
        parse(data)
    assert not list(tmp_path.iterdir())


def test_a_dump_that_is_too_large_or_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_dump, "MAX_BYTES", 10)
    path = tmp_path / "rank_0"
    path.write_bytes(dump(entry(1, 5.0)))
    with pytest.raises(DumpError, match="more than"):
        recorder_dump.read(path)
    os.mkfifo(tmp_path / "rank_1")
    with pytest.raises(OSError):
        recorder_dump.read(tmp_path / "rank_1")


def test_shapes_of_a_wrong_type_are_left_out() -> None:
    sizes = [parse(dump(entry(1, 5.0, input_sizes=wrong)))[0].sizes for wrong in ("x", [["x"], [1], 5], [[1 << 70]])]
    assert sizes == ["", "[1]", ""]


def test_shapes_that_contain_each_other_are_left_out() -> None:
    shape: list[Any] = []
    for _ in range(60):  # as text it would have 2 to the power of 60 parts
        shape = [shape, shape]
    (found,) = parse(dump(entry(1, 1.0, input_sizes=[shape, [2, 3]])))
    assert found.sizes == "[2, 3]"
