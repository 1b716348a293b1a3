# SPDX-License-Identifier: BSD-3-Clause
"""Find the commands inside the string of a ``bash -c STRING``.

The scanner parses the string as a shell does (quotes, expansions, operators, redirections, here-documents) instead of
searching its text: a torchrun in a comment, in an argument or in ``$(…)`` is not a command. It expands nothing, and
marks expansions in the words; the shell expands them when the job runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchx.specs import macros

from torchx_monarch.command.torchrun_options import UNEXPANDED

_MACRO = "|".join(macros.Values("", "", "", "").to_dict())
_SUBSTITUTED = re.compile(rf"\$(?:\$|(?:{_MACRO})(?!\w)|\{{(?:{_MACRO})\}})", re.ASCII)
"""What TorchX replaces in a text (``string.Template``), each by one character here."""

SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
_SHELL_FLAGS_WITH_VALUE = frozenset({"--rcfile", "--init-file"})

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=", re.ASCII)
_OPENING, _QUOTED_OPENING = re.compile(r"""["`]|\$["'({]"""), re.compile(r'["`]|\$[({]')
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]", re.ASCII)
_REDIRECTION = re.compile(r"&>>?|<<<|<<-?|<>|<&|>>|>&|>\||[<>](?!\()")
_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[\n;&|()]")
_PROCESS_SUBSTITUTION = re.compile(r"[<>]\(")
_BLANKS = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)*")
_WORD_END = " \t\n;&|()<>"

# Reserved words that precede a command.
_RESERVED = frozenset({"!", "{", "if", "then", "else", "elif", "while", "until", "do", "time"})
_LOOPS = frozenset({"for", "while", "until", "select"})


@dataclass(frozen=True)
class Word:
    """One word of a command.

    Attributes:
        start: index of its first character in the string.
        value: the word without its quotes, with UNEXPANDED in place of each expansion.
        bare: whether it has neither quotes nor expansions, and so can be a reserved word.
    """

    start: int
    value: str
    bare: bool


@dataclass(frozen=True)
class SimpleCommand:
    """A command that the shell would execute.

    Attributes:
        words: its words, without redirections, and without assignments and reserved words (``then``) before it. Never
            empty.
        alone: whether the string holds no other command and no operator.
        looped: whether it is inside a loop.
    """

    words: tuple[Word, ...]
    alone: bool
    looped: bool


def substitute(text: str) -> str:
    """Substitute ``text`` as TorchX does with the arguments and the environment of a role.

    ``$$`` becomes ``$``, and UNEXPANDED stands for each macro such as ``${app_id}``: its value is unknown before the
    job is submitted, and may be a shell variable (Slurm). Any other ``$`` stays.
    """
    return _SUBSTITUTED.sub(lambda match: "$" if match[0] == "$$" else UNEXPANDED, text)


def _before_substitution(text: str, position: int) -> int:
    """Return the index in ``text`` of the character that its substitution has at a position."""
    for match in _SUBSTITUTED.finditer(text):
        if match.start() >= position:
            break
        position += len(match[0]) - 1
    return position


def escape(text: str) -> str:
    """Return a template whose substitution is ``text``."""
    return text.replace("$", "$$")


def shell_operand(words: Sequence[str]) -> tuple[int, bool]:
    """Return the index of the first word after the options of a shell, and whether it is the string of ``-c``.

    Args:
        words: the command, which begins with the shell. It may end before that word.
    """
    position, reads_string = 1, False
    while position < len(words):
        word = words[position]
        if word in ("-", "--"):
            position += 1
            break
        if word[:1] not in ("-", "+"):
            break
        if word.startswith("--"):
            position += word in _SHELL_FLAGS_WITH_VALUE
        else:
            reads_string |= word[0] == "-" and "c" in word
            position += word[-1] in "oO"
        position += 1
    return position, reads_string


def simple_commands(text: str) -> Iterator[SimpleCommand]:
    """Yield the commands in ``text`` that the shell would execute, except those inside ``$(…)``.

    Yields nothing if a quote or bracket is never closed: the shell reports the error when the job runs.

    Args:
        text: the string as in the role's arguments, with TorchX's macros and ``$$``.
    """
    scanner = _Scanner(substitute(text))
    try:
        scanner.run()
    except _OpenEnded:
        return
    loops, commands = 0, [*filter(None, scanner.commands)]
    for words in commands:
        prefix = _prefix(words)
        keywords = [word.value for word in words[: prefix + 1] if word.bare]
        loops += sum(keyword in _LOOPS for keyword in keywords) - keywords.count("done")
        if prefix < len(words):
            yield SimpleCommand(
                words=tuple(replace(word, start=_before_substitution(text, word.start)) for word in words[prefix:]),
                alone=len(commands) == 1 and not scanner.compound and _RESERVED.isdisjoint(keywords),
                looped=loops > 0,
            )


def _prefix(words: Sequence[Word]) -> int:
    """Return the number of ``words`` that precede the command itself."""
    after_time = False
    for count, word in enumerate(words):
        reserved = word.bare and (word.value in _RESERVED or (after_time and word.value == "-p"))
        if not (reserved or ASSIGNMENT.match(word.value)):
            return count
        after_time = word.value == "time"
    return len(words)


class _OpenEnded(Exception):
    """A quote or bracket is never closed."""


class _Scanner:
    """Split shell text into simple commands.

    Attributes:
        commands: the words of each command, without redirections; none between two operators.
        compound: whether the text has an operator other than ``;`` and the end of a line.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[list[Word]] = [[]]
        self.compound = False
        self._text = text
        self._position = 0
        self._here_documents: list[re.Pattern[str]] = []
        """What ends the here-documents that begin after this line."""

    def run(self) -> None:
        self._take(_BLANKS)
        while self._position < len(self._text):
            if operator := self._take(_REDIRECTION):
                self._take(_BLANKS)
                end = re.escape(self._word().value)
                if operator in ("<<", "<<-"):
                    self._here_documents.append(re.compile(f"^\t*{end}$" if operator == "<<-" else f"^{end}$", re.M))
            elif operator := self._take(_OPERATOR):
                self.commands.append([])
                self.compound |= operator not in (";", "\n")
                if operator == "\n":
                    self._skip_here_documents()
            else:
                word = self._word()
                descriptor = word.bare and word.value.isdigit() and self._peek() in ("<", ">")  # the 2 in 2>
                if not descriptor:
                    self.commands[-1].append(word)
            self._take(_BLANKS)

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self._position + ahead : self._position + ahead + 1]

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Skip what the pattern matches here, and return it; empty for nothing."""
        found = pattern.match(self._text, self._position)
        self._position = found.end() if found else self._position
        return found[0] if found else ""

    def _skip_here_documents(self) -> None:
        for end in self._here_documents:
            found = end.search(self._text, self._position)
            self._position = found.end() + 1 if found else len(self._text)
        self._here_documents.clear()

    def _word(self) -> Word:
        start, value, bare = self._position, "", True
        while character := self._peek():
            opens_array = character == "(" and ASSIGNMENT.fullmatch(self._text, start, self._position)
            if opens_array or _PROCESS_SUBSTITUTION.match(self._text, self._position):
                self._position += 1 if opens_array else 2
                self._until(")")
                value, bare = value + UNEXPANDED, False
            elif character in _WORD_END:
                break
            elif character == "\\":
                if self._peek(1) != "\n":
                    value, bare = value + (self._peek(1) or "\\"), False
                self._position += 2
            elif character in "'\"$`":
                value, bare = value + self._quote_or_expansion(), False
            else:
                value += character
                bare &= character != UNEXPANDED
                self._position += 1
        return Word(start, value, bare)

    def _quote_or_expansion(self, *, quoted: bool = False) -> str:
        """Skip a quote, one ``$…`` or a backquoted command; return the quoted text, or UNEXPANDED."""
        start = self._position + 1
        if self._peek() == "'":
            self._position = self._text.find("'", start) + 1
            if self._position == 0:
                raise _OpenEnded
            return self._text[start : self._position - 1]
        if opening := (_QUOTED_OPENING if quoted else _OPENING).match(self._text, self._position):
            self._position, mark = opening.end(), opening[0][-1]
            closing, inside = {"(": ")", "{": "}"}.get(mark, mark), mark == '"' or (quoted and mark == "{")
            text = self._until(closing, quoted=inside, literal=mark in "`'")
            return text if mark == '"' else UNEXPANDED
        parameter = _PARAMETER.match(self._text, start)
        self._position = parameter.end() if parameter else start
        return UNEXPANDED if parameter else "$"

    def _until(self, closing: str, *, quoted: bool = False, literal: bool = False) -> str:
        """Skip the text up to and including ``closing``; return it without its quotes.

        Args:
            quoted: whether it is in double quotes.
            literal: whether nothing nests in it.
        """
        value = ""
        while (character := self._peek()) != closing:
            if not character:
                raise _OpenEnded
            if character == "\\":
                following = self._peek(1)
                value += "\\" if quoted and following not in '\n$`"\\' else ""
                value += following.strip("\n")
                self._position += 2
            elif not literal and (character in '"$`' or (character == "'" and not quoted)):
                value += self._quote_or_expansion(quoted=quoted)
            else:
                value += character
                self._position += 1
                if character == "(" and closing == ")":
                    self._until(")")
        self._position += 1
        return value
