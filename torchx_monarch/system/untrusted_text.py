# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Show text that a rank, or another user, has chosen: it cannot begin a line of its own, nor command a terminal.

Every character that is not printable (``str.isprintable``: control characters, escape sequences, line and paragraph
separators, marks that change the direction of text, lone surrogates) is written as Python writes it in a string.
"""

from __future__ import annotations


def one_line(text: str, limit: int = 0) -> str:
    """The text as one line, for a line of ours.

    Args:
        text: from anybody. What has been through here is not changed any more.
        limit: characters of ``text`` that are shown; 0 for all.
    """
    if limit and len(text) > limit:
        text = text[:limit] + "..."
    return text if text.isprintable() else "".join(map(_escape, text))


def lines(text: str) -> list[str]:
    """The lines of a text that may have several, each as ``one_line`` has it but for its tabs."""
    return ["\t".join(map(one_line, line.split("\t"))) for line in text.rstrip("\n").split("\n")]


def printable(text: str) -> str:
    """The text with its lines and tabs, and nothing else that is not printable."""
    return "\n".join(lines(text)) if text else ""


def _escape(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]
