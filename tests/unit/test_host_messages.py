# SPDX-License-Identifier: BSD-3-Clause
"""Requests and answers between controller and hosts, as JSON and back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from torchx_monarch.controller.host_messages import BeginRun, HostError, decode_report, decode_request
from torchx_monarch.controller.host_requests import HostCall
from torchx_monarch.model.codec import DecodeError
from torchx_monarch.model.run_request import RunRequest


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("Explode", {}, "unknown request 'Explode'"),
        ("StopRanks", {"signal": "15", "grace": 1.0}, "StopRanks.signal is '15', not int"),
        ("StopRanks", {"signal": 15}, "StopRanks lacks 'grace'"),
        ("LaunchRanks", {"world": {}}, "LaunchRanks.world lacks 'attempt'"),
    ],
)
def test_an_invalid_request_is_named(name: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode_request({"name": name, "fields": fields})


@pytest.mark.parametrize(
    "answer",
    [{}, {"answer": 7}, {"answer": {"nproc": "1"}}, {"error": "too long"}, {"refused": {}}, {"refused": {"host": 1}}],
)
def test_an_invalid_answer_is_an_error(answer: dict[str, Any]) -> None:
    async def main() -> None:
        call = HostCall(1, BeginRun(1, "token", RunRequest(None, None)), [0])
        call.receive(0, answer)
        assert type(call.answers.get_nowait()[1]) is HostError

    asyncio.run(main())


def test_a_heartbeat_is_no_report() -> None:
    assert decode_report({"type": "alive"}) is None
    with pytest.raises(DecodeError, match="SignalReceived.number is '1', not int"):
        decode_report({"type": "SignalReceived", "number": "1", "announced": None})
