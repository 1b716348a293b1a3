# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exit codes as people write them: ``1+134+SIGKILL``."""

from __future__ import annotations

import os
import re
import signal

NEVER_AGAIN = os.EX_CONFIG
"""78, the configuration error of ``sysexits.h``: so a program says that another start would end in the same way."""


def parse_exit_codes(text: str) -> tuple[int, ...]:
    """Read numbers and names of signals, separated by ``+`` or commas; a signal N is the shell's 128 + N.

    Returns:
        the codes in ascending order; none for an empty text.

    Raises:
        ValueError: naming the word that is none of them, and what is allowed.
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
    if int(word) == NEVER_AGAIN:
        raise ValueError(f"{word} is the exit code with which a program asks not to be started again (EX_CONFIG)")
    return int(word)
