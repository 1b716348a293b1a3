# SPDX-License-Identifier: BSD-3-Clause
"""Find the command that a list of words executes in the end: behind programs that execute their arguments.

Such a program is a runner of the table below (``timeout 30 torchrun …``), or a set-up script (``entrypoint.sh torchrun
…``, ``bash SCRIPT torchrun …``). A word elsewhere is only a word: ``grep torchrun FILE``, ``--launcher torchrun``.

The rule is the same for the arguments of a role and for the commands of a shell string, in whose words UNEXPANDED
stands for each expansion. ``sudo`` is no runner: it removes the variables that a host process needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.command.shell import ASSIGNMENT, SHELLS, shell_operand
from torchx_monarch.command.torchrun_options import UNEXPANDED


@dataclass(frozen=True)
class _Runner:
    """A program that executes the command among its arguments.

    The options are letters of short ones and names of long ones, separated by spaces.

    Attributes:
        values: options with a value. The others are switches.
        switches: for a program most of whose options have a value: those without one. The others have a value.
        operands: number of words between the options and the command, such as the duration of ``timeout``.
        verbs: words of which one comes before the command, such as ``run`` in ``conda run``.
        idle: options with which it executes no command.
        clears: options with which the command does not get the environment variables.
        renames: options with which the command gets another name.
        sets_path: whether it changes PATH, so that another torchrun or Python may be found.
    """

    values: str = ""
    switches: str = ""
    operands: int = 0
    verbs: tuple[str, ...] = ()
    idle: str = ""
    clears: str = ""
    renames: str = ""
    sets_path: bool = False

    def read(self, words: Sequence[str]) -> tuple[int, set[str]]:
        """Return the number of words before the command, and the options among them."""
        options, operands, verb_due, ended = set[str](), self.operands, bool(self.verbs), False
        position = 0
        while position < len(words):
            word = words[position]
            if not ended and word.startswith("-"):
                ended = word == "--"
                names, takes_next = self._options_of(word)
                options.update(names)
                position += takes_next
            elif verb_due:
                if word not in self.verbs:
                    return len(words), options
                verb_due = False
            elif operands:
                operands -= 1
            elif ended or not (ASSIGNMENT.match(word) or (word and not word.strip(UNEXPANDED))):
                return position, options
            position += 1
        return len(words), options

    def _options_of(self, word: str) -> tuple[Sequence[str], bool]:
        """Return the options in a word that begins with ``-``, and whether the next word is the value of one."""
        if word.startswith("--"):
            name, joined, _ = word[2:].partition("=")
            return [name], not joined and self._has_value(name)
        for end, letter in enumerate(word[1:], start=2):
            if self._has_value(letter):
                return word[1:end], end == len(word)
        return word[1:], False

    def _has_value(self, option: str) -> bool:
        return option not in self.switches.split() if self.switches else option in self.values.split()


_SCRIPT = _Runner(sets_path=True)

_RUNNERS: Mapping[str, _Runner] = {
    **dict.fromkeys(("catchsegv", "nohup", "setsid"), _Runner()),
    **dict.fromkeys(
        ("conda", "mamba", "micromamba"),
        _Runner("n name p prefix cwd r root-prefix a attach", verbs=("run",), sets_path=True),
    ),
    "chrt": _Runner("T sched-runtime P sched-period D sched-deadline", operands=1),
    "command": _Runner(idle="v V"),
    "env": _Runner("u unset C chdir", clears="i ignore-environment"),
    "exec": _Runner("a", clears="c", renames="a"),
    "ionice": _Runner("c class n classdata"),
    "ncu": _Runner(switches="f force-overwrite nvtx call-stack csv quiet verbose disable-extra-suffixes"),
    "nice": _Runner("n adjustment"),
    "nsys": _Runner(switches="h help", verbs=("profile",)),
    "numactl": _Runner(
        "i interleave p preferred P preferred-many w weighted-interleave m membind N cpunodebind C physcpubind"
    ),
    "perf": _Runner(
        "e event o output r repeat I interval-print C cpu D delay G cgroup F freq c count m mmap-pages call-graph",
        verbs=("stat", "record"),
    ),
    "pixi": _Runner("e environment manifest-path", verbs=("run",), sets_path=True),
    "poetry": _Runner("C directory P project", verbs=("run",), sets_path=True),
    "srun": _Runner(
        switches="E H I K O Q X Z k l s u v contiguous disable-status exact exclusive hold immediate kill-on-bad-exit "
        "label no-allocate no-kill overcommit overlap oversubscribe preserve-env pty quiet reboot spread-job "
        "unbuffered use-min-nodes verbose"
    ),
    "stdbuf": _Runner("i input o output e error"),
    "strace": _Runner("a b e I o O P s S u U X trace output string-limit user env"),
    "taskset": _Runner(operands=1),
    "time": _Runner("f format o output"),
    "timeout": _Runner("k kill-after s signal", operands=1),
    "uv": _Runner(
        "p python with with-editable with-requirements extra group only-group no-group env-file package project "
        "directory index default-index index-url extra-index-url f find-links cache-dir config-file color",
        verbs=("run",),
        idle="m module s script gui-script",
        sets_path=True,
    ),
}

SETS_PATH = re.compile(r"(?<!\w)PATH=", re.ASCII)


@dataclass(frozen=True)
class CommandPosition:
    """Where the command of a list of words begins, and what the words before it do to it.

    Attributes:
        start: index of its first word.
        sets_path: whether PATH may be changed, so that another torchrun or Python is found.
        is_cleared: whether the environment variables are removed.
        is_renamed: whether it gets another name, by which Python would not find its environment.
    """

    start: int
    sets_path: bool = False
    is_cleared: bool = False
    is_renamed: bool = False


def command_position(words: Sequence[str]) -> CommandPosition | None:
    """Return where the command begins that ``words`` execute in the end; None if they execute none.

    A shell with ``-c`` is itself the command, whose string may hold others.
    """
    start, is_script = 0, False
    sets_path = is_cleared = is_renamed = False
    while start < len(words):
        name = os.path.basename(words[start])
        if name in SHELLS and not is_script:
            operand, is_string = shell_operand(words[start:])
            if not is_string:
                start, is_script = start + operand, True
                continue
        runner = _SCRIPT if is_script or name.endswith(".sh") else _RUNNERS.get(name)
        if runner is None:
            return CommandPosition(start, sets_path, is_cleared, is_renamed)
        before, options = runner.read(words[start + 1 :])
        if not options.isdisjoint(runner.idle.split()):
            return None
        sets_path |= runner.sets_path or any(map(SETS_PATH.match, words[start : start + 1 + before]))
        is_cleared |= not options.isdisjoint(runner.clears.split())
        is_renamed = not options.isdisjoint(runner.renames.split())
        start, is_script = start + 1 + before, False
    return None
