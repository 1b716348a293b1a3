# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""JSON messages between the processes of a job: a size limit, a version in the greeting.

A message is one line, an object. One that is longer than ``MAX_LINE`` comes after a header line that says its length in
bytes, ``{"frame": 123456}``: whoever reads knows what to expect before it comes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

VERSION = 1
"""Sent in every greeting; the two ends of a job run the same release, so any other version is refused."""

MAX_LINE = 1 << 16
"""Longest line in bytes. Nearly all messages are far shorter."""

MAX_MESSAGE = 1 << 23
"""Longest message in bytes. The largest real one is a command with its arguments and environment; Linux allows these 2
MiB (ARG_MAX), which as JSON may be more than twice as much."""

MAX_ERROR = 8000
"""Longest text in characters that a host sends of why it cannot take part; JSON may spend six bytes on each."""

Message = dict[str, Any]


class ProtocolError(Exception):
    """What came over a connection is not a message of ours."""


def encode(message: Message) -> bytes:
    """One message as bytes.

    Raises:
        ProtocolError: the message is longer than ``MAX_MESSAGE``.
    """
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) <= MAX_LINE:
        return line
    if len(line) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(line)} bytes is over the limit of {MAX_MESSAGE} bytes")
    return b'{"frame":%d}\n' % len(line) + line


def decode(line: bytes) -> Message:
    """The message that a line holds.

    Raises:
        ProtocolError: it is no JSON object.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not a JSON line: {line[:80]!r}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"not a JSON object: {line[:80]!r}")
    return message


def frame_size(message: Message) -> int:
    """The length in bytes of the message that follows, where this one is its header; else 0.

    Raises:
        ProtocolError: the message is longer than ``MAX_MESSAGE``, or its length is no number.
    """
    if "frame" not in message:
        return 0
    size = message["frame"]
    if not isinstance(size, int) or not 0 < size <= MAX_MESSAGE:
        raise ProtocolError(f"a message of {str(size)[:20]} bytes is over the limit of {MAX_MESSAGE} bytes")
    return size


async def receive(reader: asyncio.StreamReader, timeout: float | None = None) -> Message | None:
    """The next message, or None when the other end has closed the connection.

    Args:
        reader: opened with ``limit=MAX_LINE``.
        timeout: seconds that a line, and the message of a frame, may take; None for no limit.

    Raises:
        ProtocolError: what came is no JSON object, or is too long.
        TimeoutError: nothing came in time.
    """
    message = await _receive(reader.readline(), timeout)
    if message is not None and (size := frame_size(message)):
        return await _receive(reader.readexactly(size), timeout)
    return message


async def _receive(reading: Coroutine[Any, Any, bytes], timeout: float | None) -> Message | None:
    try:
        line = await asyncio.wait_for(reading, timeout)
    except asyncio.IncompleteReadError:
        return None
    except ValueError:
        raise ProtocolError(f"a line is over the limit of {MAX_LINE} bytes") from None
    except (OSError, asyncio.TimeoutError) as error:  # on Python 3.10 the latter is not yet the builtin TimeoutError
        if isinstance(error, OSError) and error.errno is not None:
            return None  # broken, or given up by the kernel (ETIMEDOUT), which is a TimeoutError as well
        raise TimeoutError(f"no message within {timeout or 0:g} s") from None
    return decode(line) if line.endswith(b"\n") else None


async def send(writer: asyncio.StreamWriter, message: Message) -> bool:
    """Send one message; False when the other end is gone."""
    try:
        writer.write(encode(message))
        await writer.drain()
    except (OSError, RuntimeError):
        return False
    return True
