# SPDX-License-Identifier: BSD-3-Clause
"""Find the commands that the documentation tells a reader to type.

These are the lines of code blocks for a shell, and what stands in backticks in the text and begins like a command.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

SHELLS = ("sh", "bash", "shell", "console")
"""Languages of code blocks of which every line is a command; of `console` those after ``$``."""

_PLAIN = ("", "text")
"""Languages of code blocks that may be commands, or anything else. An indented block has none."""

_FENCE = re.compile(r"^\s*(```+|~~~+)\s*\{?\.?([\w-]*)")
_COMPONENT = re.compile(r"monarch\.(spmd|hosts|controller) ")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Command:
    """A simple command: no pipe, no list.

    Attributes:
        page: path of its page, relative to the root of the repository.
        line: its line, from 1.
        words: the words of the command, without assignments before it and redirections.
        in_block: whether it is a line of a code block.
        in_shell: whether that block consists of commands only.
    """

    page: str
    line: int
    words: tuple[str, ...]
    in_block: bool = False
    in_shell: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"

    @property
    def program(self) -> str:
        """The first word."""
        return self.words[0]

    @property
    def is_abbreviated(self) -> bool:
        """Whether a part of it is left out."""
        return any(word in ("…", "...") for word in self.words)


def pages() -> list[Path]:
    """Return all pages: README.md, docs and the like. The changelog tells of commands of its time."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        hidden = [name for name in folders if name.startswith(".") and name != ".github"]
        for name in [*hidden, "build", "dist", "site", "node_modules", "wheels"]:
            if name in folders:
                folders.remove(name)
        found += [Path(folder, name) for name in files if name.endswith(".md") and name != "CHANGELOG.md"]
    return sorted(found)


def commands(page: Path) -> list[Command]:
    """Return the commands of a page, those of code blocks first."""
    name, text = str(page.relative_to(ROOT)), page.read_text()
    found: list[Command] = []
    prose: list[tuple[int, str]] = []
    for number, language, block in _split(text):
        if language is None:
            prose.append((number, block))
        else:
            found += _of_block(name, number, language, block)
    for number, paragraph in prose:
        for match in re.finditer(r"`([^`]+)`", paragraph):
            span = " ".join(match[1].replace("\\|", "|").split())
            if is_command(span):
                line = number + paragraph[: match.start()].count("\n")
                words = f"torchx run -s monarch_local {span}" if _COMPONENT.match(span) else span
                found += [Command(name, line, simple) for simple in split_words(words)]
    return found


def is_command(span: str) -> bool:
    """Return whether what stands in backticks is a command, and not a name such as `torchx status`."""
    return bool(
        re.match(r"(torchx [a-z]+ \S|make [a-z]|pip install |python (bench|docs|-m tests)\S* ?)", span)
    ) or bool(_COMPONENT.match(span))


def _split(text: str) -> Iterator[tuple[int, str | None, str]]:
    """Yield line number, language and text of each code block, and of each piece of text between, which has None."""
    fence, language, start = "", "", 1
    lines: list[str] = []

    def is_indented(line: str) -> bool:
        return line.startswith("    ") and not fence

    indented = False
    for number, line in enumerate(text.splitlines(), 1):
        opening = _FENCE.match(line)
        if opening and (not fence or (opening[1] == fence and not opening[2])):
            if lines:
                yield start, (language if fence else "" if indented else None), "\n".join(lines)
            language, fence = ("", "") if fence else (opening[2].lower(), opening[1])
            start, lines, indented = number + 1, [], False
            continue
        # A blank line ends neither an indented block nor a piece of text.
        if not fence and line.strip() and is_indented(line) != indented:
            if lines:
                yield start, "" if indented else None, "\n".join(lines)
            start, lines, indented = number, [], is_indented(line)
        lines.append(line)
    if lines:
        yield start, "" if indented else None, "\n".join(lines)


def _of_block(page: str, start: int, language: str, block: str) -> Iterator[Command]:
    """Yield the commands of a code block."""
    if language not in (*SHELLS, *_PLAIN):
        return
    in_shell = language in SHELLS
    has_prompts = bool(re.search(r"^\s*\$ ", block, re.MULTILINE))
    # A line that ends with a backslash goes on in the next one.
    joined = re.sub(r"\\\n\s*", lambda found: "\0", block)
    number = start
    for line in joined.split("\n"):
        text = line.replace("\0", " ").strip()
        if has_prompts and not text.startswith("$ "):
            text = ""
        for words in split_words(text.removeprefix("$ ")) if text and _may_be_words(text) else ():
            yield Command(page, number, words, in_block=True, in_shell=in_shell)
        number += 1 + line.count("\0")


def _may_be_words(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:  # a quote alone: text, or output
        return False
    return True


def split_words(line: str) -> list[tuple[str, ...]]:
    """Split a line into simple commands, without comments, assignments before a command, and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    redirects = False
    for word in lexer:
        if word and not word.strip("|&;"):
            found.append([])
        elif word and not word.strip("<>&"):
            redirects = True
        elif redirects:
            redirects = False
        elif not (not found[-1] and _ASSIGNMENT.match(word)):
            found[-1].append(word)
    return [tuple(words) for words in found if words]
