# SPDX-License-Identifier: BSD-3-Clause
"""Requests and answers between controller and hosts, as JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchx_monarch.controller.host_messages import (
    Answer,
    BeginRun,
    FileProbed,
    FinishRun,
    Launched,
    LaunchRanks,
    OpenStore,
    ProbeFile,
    RanksExited,
    Refused,
    Report,
    Request,
    RunBegun,
    RunFinished,
    RunOutput,
    SampleRanks,
    SignalReceived,
    StopRanks,
    StoreOpened,
    WatchRanks,
    decode_answer,
    decode_report,
    decode_request,
    encode_message,
    encode_request,
)
from torchx_monarch.model.codec import DecodeError
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.world import World

WORLD = World(1, 2, 1, (0, 3), (2, 4), "node7", 29500, True, "id")
EXIT = RankExit(3, 1, 0, "node7", 4711, -9, 5.5, None, "/e", {"message": {"extraInfo": {"began": False}}}, "", 1.0, "")


@pytest.mark.parametrize(
    "request_",
    [
        OpenStore("", "node7", 2),
        LaunchRanks(WORLD),
        WatchRanks(),
        StopRanks(15, 30.0),
        SampleRanks(),
        BeginRun(3, "ab", RunRequest(("torchrun", "x.py"), None, env={"A": "b"}, timeout=3.0)),
        BeginRun(4, "cd", RunRequest(None, ("x.py",), synced=True, code="e")),
        FinishRun("ab"),
        ProbeFile("/x", "text"),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_: Request) -> None:
    name, fields = encode_request(request_)
    assert decode_request(name, json.loads(json.dumps(fields))) == request_


@pytest.mark.parametrize(
    "answer",
    [
        StoreOpened("node7", 29500, True),
        Launched(1, (4711, 4712)),
        Launched(1, (4711,), (100.0, 101.5)),
        RanksExited(0, (EXIT,)),
        RanksExited(0, ()),
        RunBegun(0, 2, "id", 3, 30.0),
        RunFinished(1),
        FileProbed(1, True),
        Refused(1, "host 1 (node7)", "no such file", 2),
    ],
)
def test_an_answer_arrives_as_it_was_sent(answer: Answer) -> None:
    assert decode_answer(json.loads(json.dumps(encode_message(answer)))) == answer


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Explode", {}, "unknown request 'Explode'"),
        ("StopRanks", {"signal": "15", "grace": 1.0}, "StopRanks.signal is '15', not int"),
        ("StopRanks", {"signal": 15}, "StopRanks lacks 'grace'"),
        ("LaunchRanks", {"world": {}}, "LaunchRanks.world lacks 'attempt'"),
    ],
)
def test_an_invalid_request_is_named(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode_request(name, fields)


@pytest.mark.parametrize("answer", [{}, {"type": 7}, {"type": "StopRanks"}, {"type": "RunFinished", "replica": "1"}])
def test_an_invalid_answer_is_an_error(answer: dict[str, Any]) -> None:
    with pytest.raises(DecodeError):
        decode_answer(answer)


@pytest.mark.parametrize("report", [SignalReceived(15, None), SignalReceived(2, True), RunOutput("a", "")])
def test_a_report_arrives_as_it_was_sent(report: Report) -> None:
    assert decode_report(json.loads(json.dumps(encode_message(report)))) == report


def test_a_heartbeat_is_no_report() -> None:
    assert decode_report({"type": "alive"}) is None
    with pytest.raises(DecodeError, match="SignalReceived.number is '1', not int"):
        decode_report({"type": "SignalReceived", "number": "1", "announced": None})
