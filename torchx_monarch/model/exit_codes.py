# SPDX-License-Identifier: BSD-3-Clause
"""Parse lists of exit codes such as ``1+134+SIGKILL``."""

from __future__ import annotations

import os
import re
import signal

NO_RESTART = os.EX_CONFIG
"""Exit code with which a program asks not to be restarted: 78, the configuration error of ``sysexits.h``."""


def parse_exit_codes(text: str) -> tuple[int, ...]:
    """Parse numbers and names of signals, separated by ``+`` or commas. Signal N becomes 128 + N, as in a shell.

    Returns:
        The exit codes in ascending order; empty for an empty string.

    Raises:
        ValueError: a word is neither an exit code from 1 to 255 nor the name of a signal, or is ``NO_RESTART``.
    """
    return tuple(sorted({_exit_code(word.strip()) for word in re.split("[+,]", text)})) if text.strip() else ()


def _exit_code(word: str) -> int:
    if word in signal.Signals.__members__:
        return 128 + signal.Signals[word]
    if not re.fullmatch("[0-9]+", word) or not 1 <= int(word) <= 255:
        raise ValueError(
            f"{word!r} is no exit code of a failure: use numbers from 1 to 255 and names of signals such as SIGKILL, "
            "separated by + or commas"
        )
    if int(word) == NO_RESTART:
        raise ValueError(f"{word} is the exit code with which a program asks not to be started again (EX_CONFIG)")
    return int(word)
