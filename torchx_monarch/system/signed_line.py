# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A host's result as a line of its log, for a backend that has nothing else to read it from.

Ranks write to the same log. So the line carries a message authentication code under a key that the backend draws for
each job and gives to its hosts alone: what merely looks like such a line is not believed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

KEY_VARIABLE = "MONARCH_RESULT_KEY"
"""Holds the key, in the environment of hosts; absent where the backend reads the result elsewhere."""

_LINE = re.compile(r"\[monarch\] result ([0-9a-f]{64}) (\{.*\})\s*")


def sign(text: str, key: str) -> str:
    """The line, without the ``[monarch]`` before it.

    Args:
        text: a JSON object in one line.
        key: of the job.
    """
    return f"result {_code(text, key)} {text}"


def verified(lines: Iterable[str], key: str) -> list[str]:
    """The texts of those lines that were signed with the key, in order; none where the key is empty.

    Args:
        lines: of a log, with ``[monarch]`` before ours.
        key: of the job.
    """
    found = [match for line in lines if (match := _LINE.fullmatch(line))] if key else []
    return [match[2] for match in found if hmac.compare_digest(match[1], _code(match[2], key))]


def _code(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(errors="backslashreplace"), hashlib.sha256).hexdigest()
