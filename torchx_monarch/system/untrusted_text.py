# SPDX-License-Identifier: BSD-3-Clause
"""Escape text from a rank or another user, so that it can neither start a new line nor control a terminal.

Characters that are not printable by ``str.isprintable`` (control characters, escape sequences, line and paragraph
separators, marks that change the direction of text, lone surrogates) are escaped as in a Python string literal.
"""

from __future__ import annotations


def one_line(text: str, limit: int = 0) -> str:
    """Escape a text, or the first ``limit`` characters of it, so that it fits on one line."""
    if limit and len(text) > limit:
        text = text[:limit] + "..."
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def lines(text: str) -> list[str]:
    """Split a text into lines and escape each as ``one_line`` does, but keep its tabs."""
    return ["\t".join(map(one_line, line.split("\t"))) for line in text.rstrip("\n").split("\n")]


def printable(text: str) -> str:
    """Escape a text, but keep its line feeds and tabs."""
    return "\n".join(lines(text)) if text else ""
