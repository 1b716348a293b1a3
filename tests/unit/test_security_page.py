# SPDX-License-Identifier: BSD-3-Clause
"""docs/explanation/security.md and docs/how_to/set_up_security.md explain the messages and options that there are."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from torchx_monarch.transport import address, connections
from torchx_monarch.transport.connections import Address

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explanation" / "security.md").read_text()
SETUP = (DOCS / "how_to" / "set_up_security.md").read_text()
WHERE = Address("tls", "node0", 26599)


def unverified(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError()
    error.verify_code, error.verify_message = code, "why"
    return error


def alert(name: str) -> ssl.SSLError:
    error = ssl.SSLError()
    error.reason = name
    return error


@pytest.mark.parametrize(
    "error",
    [
        *(unverified(code) for code in (9, 10, 62, 64, 20)),
        *(alert(name) for name in [*address._ALERTS, "WRONG_VERSION_NUMBER", "ANYTHING"]),
        socket.gaierror(-2, "Name or service not known"),
        asyncio.TimeoutError(),
        ConnectionAbortedError("SSL handshake is taking longer"),
        ConnectionResetError(),
        OSError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'reason', None) or getattr(error, 'verify_code', '')}",
)
def test_every_reason_why_there_is_no_connection_is_explained(error: BaseException) -> None:
    text = str(connections.explain(error, WHERE))
    assert text.startswith("node0:26599: ")
    said = text[len("node0:26599: ") :].replace("'node0'", "'...'").partition(":")[0].partition(" (ANY")[0]
    assert said.partition(" (why")[0] in PAGE


def test_every_option_of_the_network_is_explained() -> None:
    command = [sys.executable, "-m", "torchx_monarch.host", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    for option in ("--bind", "--advertise", "--ports", "--peer-timeout", "--rejoin-timeout"):
        assert option in text
        assert f"`{option} " in SETUP
