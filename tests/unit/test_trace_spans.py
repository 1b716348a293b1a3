# SPDX-License-Identifier: BSD-3-Clause
"""The spans of a trace: their ids, their categories of failures, and each sent once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from torchx_monarch.host import trace_export
from torchx_monarch.insight import trace_spans
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.trace_spans import TraceSpan


def event(time: float, kind: str, **fields: Any) -> Event:
    return {"time": 1000 + time, "kind": kind, "message": "", "role": "r", **fields}


def build(*happened: Event, end: float = 30.0) -> dict[str, TraceSpan]:
    return {span.name: span for span in trace_spans.build(happened, "app", "r", 0, end=1000 + end)}


START = [event(0, "submitted"), event(2, "hosts"), event(4, "ranks", attempt=0), event(5, "output")]


def test_the_spans_of_a_job_with_a_restart() -> None:
    happened = [
        *START,
        event(8, "failure", rank=1),
        event(9, "rank_restart", attempt=1, rank=1, code=3),
        event(10, "ranks", attempt=1),
        event(20, "result", code=0),
    ]
    spans = trace_spans.build(happened, "app", "r", 0, end=1021)
    names = {span.id: span.name for span in spans}
    assert len(names) == len(spans)
    inside = [(span.name, names[span.parent], span.seconds) for span in map(Flat, spans) if span.parent]
    assert ("attempt 1", "job", 7) in inside and ("attempt 2", "job", 11) in inside
    assert ("first output", "attempt 1", 1) in inside and ("stopping", "attempt 1", 1) in inside
    assert ("end", "job", 1) in inside
    assert [span.error for span in spans if span.error] == ["exit code 3"]
    # Those of a part of the events are the same, as far as they have ended.
    earlier = {span.id: span for span in trace_spans.build(happened[:7], "app", "r", 0, end=1010)}
    assert [span for span in earlier.values() if span.end < 1010] == [span for span in spans if span.end < 1010]


class Flat:
    def __init__(self, span: TraceSpan) -> None:
        self.name, self.parent, self.seconds = span.name, span.parent, span.end - span.start


@pytest.mark.parametrize(
    ("failed", "category"),
    [
        ([event(8, "failure", rank=1), event(9, "result", code=1)], "exit code 1"),
        ([event(8, "failure", rank=1), event(9, "result", code=137)], "SIGKILL"),
        ([event(8, "failure", rank=1), event(9, "rank_restart", code=-11)], "SIGSEGV"),
        ([event(8, "failure", rank=1)], "rank failure"),
        ([event(8, "failure", replica=1), event(9, "result", code=1)], "host failure"),
        ([event(8, "preempted", replica=1), event(9, "result", code=143)], "preempted"),
        ([event(6, "hang"), event(8, "failure", rank=1), event(9, "result", code=1)], "hang"),
        (
            [event(6, "hang"), event(7, "hang_end"), event(8, "failure", rank=1), event(9, "result", code=2)],
            "exit code 2",
        ),
        ([event(6, "hang"), event(7, "hang_end"), event(9, "result", code=0)], ""),
        ([event(9, "result", code=0)], ""),
        ([event(8, "stop"), event(9, "result", code=143)], ""),
    ],
)
def test_a_failure_has_a_category_and_no_message(failed: list[Event], category: str) -> None:
    assert build(*START, *failed)["attempt 1"].error == category


def test_a_run_of_a_live_allocation_has_a_number_and_not_its_command() -> None:
    run = [event(6, "run", run=7, message="run 7: train.py --password hunter2"), event(7, "ranks", attempt=0)]
    spans = build(*START[:3], *run, event(9, "run_end", run=7, code=2))
    assert spans["run 7"].error == "exit code 2" and spans["run 7"].attributes["process.exit.code"] == 2
    assert "hunter2" not in repr(spans)


def test_the_trace_id_follows_from_the_app_alone() -> None:
    assert trace_spans.trace_id("app") == trace_spans.trace_id("app") != trace_spans.trace_id("app2")
    assert 0 < trace_spans.trace_id("app") < 1 << 128
    ids = [{span.id for span in trace_spans.build(START, "app", "r", restart, end=1009)} for restart in (0, 1)]
    assert not ids[0] & ids[1]


def test_nothing_but_numbers_is_taken_of_an_event() -> None:
    fields = {"rank": 1, "code": "hunter2", "error": "hunter2", "hosts": [{"replica": 0, "name": "hunter2"}, "hunter2"]}
    found = trace_spans.reduce("ranks", 1.0, 0.5, fields)
    assert "hunter2" not in json.dumps(found)
    assert (found["rank"], found["seconds"], found["hosts"]) == (1, 0.5, [{"replica": 0}])


def test_a_start_begins_with_the_last_restart_of_its_role() -> None:
    other = {**event(3, "restart"), "role": "other"}
    happened = [event(0, "submitted"), event(1, "ranks"), event(2, "restart"), other, event(4, "replica_started")]
    assert [event["kind"] for event in trace_spans.since_last_restart(happened, "r")] == ["restart", "replica_started"]
    assert len(trace_spans.since_last_restart(happened[:2], "r")) == 2


def test_each_span_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "alarm", lambda seconds: 0)
    happened = [*START, event(8, "failure", rank=1), event(9, "rank_restart", code=1), event(10, "result", code=1)]
    batches: list[list[str]] = []

    def export(spans: Sequence[TraceSpan]) -> None:
        batches.append([span.name for span in spans])

    trace_export.send_all(iter(happened), "app", "r", 0, export)
    assert "attempt 1" in batches[0] and "job" not in batches[0]
    assert "job" in batches[-1] and "attempt 1" not in sum(batches[1:], [])


def test_another_protocol_is_refused_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_exporter(trace: int) -> Iterator[None]:
        raise AssertionError

    monkeypatch.setattr(trace_export, "exporter", no_exporter)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SystemExit, match="no traces: the protocol is grpc"):
        trace_export.main(["3", "app", "r", "0"])


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, 1),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "5"}, 5),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "5", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "0.5"}, 0.5),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10000"}, 60),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "-1"}, 0),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "nan"}, 0),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, 1),
    ],
)
def test_the_last_spans_have_the_time_that_opentelemetrys_variables_give(
    variables: dict[str, str], seconds: float
) -> None:
    assert trace_export.end_timeout(variables) == seconds
