# SPDX-License-Identifier: BSD-3-Clause
"""Sign a host's result as a line of its log, for backends that can read it from the log alone.

Ranks write to the same log. The line therefore carries a message authentication code under a key that the backend
creates for each job and gives only to its hosts. Lines that merely look like results are ignored.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

KEY_VARIABLE = "MONARCH_RESULT_KEY"
"""The environment variable with the key of a host; unset where the backend does not read the result from the log."""

_LINE = re.compile(r"\[monarch\] result ([0-9a-f]{64}) (\{.*\})\s*")


def sign(text: str, key: str) -> str:
    """Return the signed line, without the ``[monarch]`` before it."""
    return f"result {_code(text, key)} {text}"


def verified(lines: Iterable[str], key: str) -> list[str]:
    """Return the texts of the log lines that were signed with the key, in order; none if the key is empty."""
    found = [match for line in lines if (match := _LINE.fullmatch(line))] if key else []
    return [match[2] for match in found if hmac.compare_digest(match[1], _code(match[2], key))]


def _code(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(errors="backslashreplace"), hashlib.sha256).hexdigest()
