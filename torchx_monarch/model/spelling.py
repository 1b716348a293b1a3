# SPDX-License-Identifier: BSD-3-Clause
"""Suggest what a person may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean NAME?``, with a leading blank, for the name that is most like a word; empty if none is.

    A name also counts as near if it only begins like the word: ``--nprocs`` is near ``--nproc-per-node``. Upper and
    lower case, ``-`` and ``_`` are the same here.
    """
    typed = _folded(word)
    whole: dict[str, str] = {}
    beginnings: dict[str, str] = {}
    for name in choices:
        whole.setdefault(_folded(name), name)
        beginnings.setdefault(_folded(name)[: len(typed)], name)
    for names in (whole, beginnings):
        found = difflib.get_close_matches(typed, names, n=1, cutoff=0.7)
        if found:
            return f" Did you mean {names[found[0]]}?"
    return ""


def _folded(name: str) -> str:
    return name.strip("-").replace("_", "-").lower()
