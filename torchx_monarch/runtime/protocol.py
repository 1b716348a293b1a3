# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""JSON lines between the processes of a job: one object a line, a size limit, a version in the greeting."""

from __future__ import annotations

import asyncio
import json
from typing import Any

VERSION = 1
"""Sent in every greeting; the two ends of a job run the same release, so any other version is refused."""

MAX_LINE = 1 << 20
"""Longest message in bytes. The largest real one, an error with its traceback, is a few kilobytes."""

MAX_GREETING = 1 << 16
"""Longest message in bytes that replica 0 takes of another process, which may be anybody's. Those are short: a host's
registration, which is cut where it is long (``MAX_ERROR``), and signs of life."""

MAX_ERROR = 8000
"""Longest text in characters that a host sends of why it cannot take part; JSON may spend six bytes on each."""

Message = dict[str, Any]


class ProtocolError(Exception):
    """What came over a connection is not a message of ours."""


def encode(message: Message) -> bytes:
    """One message as a line of bytes.

    Raises:
        ProtocolError: the message is longer than ``MAX_LINE``.
    """
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a message of {len(line)} bytes is over the limit of {MAX_LINE}")
    return line


async def receive(reader: asyncio.StreamReader, timeout: float | None = None) -> Message | None:
    """The next message, or None when the other end has closed the connection.

    Args:
        reader: opened with ``limit=MAX_LINE``.
        timeout: seconds of silence that are allowed; None for no limit.

    Raises:
        ProtocolError: what came is no JSON object, or too long.
        TimeoutError: nothing came in time.
    """
    try:
        line = await asyncio.wait_for(reader.readline(), timeout)
    except ValueError:
        raise ProtocolError(f"a message is over the limit of {MAX_LINE} bytes") from None
    except (OSError, asyncio.TimeoutError) as error:  # on Python 3.10 the latter is not yet the builtin TimeoutError
        if isinstance(error, OSError) and error.errno is not None:
            return None  # broken, or given up by the kernel (ETIMEDOUT), which is a TimeoutError as well
        raise TimeoutError(f"no message within {timeout or 0:g} s") from None
    if not line.endswith(b"\n"):
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not a JSON line: {line[:80]!r}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"not a JSON object: {line[:80]!r}")
    return message


async def send(writer: asyncio.StreamWriter, message: Message) -> bool:
    """Send one message; False when the other end is gone."""
    try:
        writer.write(encode(message))
        await writer.drain()
    except (OSError, RuntimeError):
        return False
    return True
