# SPDX-License-Identifier: BSD-3-Clause
"""Requests and answers between controller and hosts, as JSON and back."""

from __future__ import annotations

from typing import Any

import pytest

from torchx_monarch.controller.host_messages import (
    decode_answer,
    decode_report,
    decode_request,
)
from torchx_monarch.model.codec import DecodeError


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


def test_a_heartbeat_is_no_report() -> None:
    assert decode_report({"type": "alive"}) is None
    with pytest.raises(DecodeError, match="SignalReceived.number is '1', not int"):
        decode_report({"type": "SignalReceived", "number": "1", "announced": None})
