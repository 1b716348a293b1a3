# SPDX-License-Identifier: BSD-3-Clause
"""When standard input counts as given to the command: redirected for it alone, with content that nobody has read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ASK = [sys.executable, "-c", "from torchx_monarch.schedulers.foreground import *; print(has_unread_input())"]


def asked(shell: str, folder: Path, **more: object) -> list[str]:
    """Return what the command says that the shell runs as "$@" once, or more often."""
    command = ["sh", "-c", shell, "sh", *ASK]
    more.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=60, check=True, **more)  # type: ignore[call-overload]
    return str(done.stdout).split()


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ('"$@"', "False"),  # /dev/null
        ('"$@" <&-', "False"),
        ('"$@" < content; :', "True"),
        ('"$@" < empty; :', "False"),
        ('{ echo one; sleep 0.1; } | { "$@"; :; }', "False"),  # of a group of commands, not of this one alone
        ('(sleep 1) | "$@"', "False"),  # it may never end, and is not waited for
        ("""while read line; do "$@"; done < content""", "False False"),
        ("""printf '"$@"\\n:\\n' > script; sh -s "$@" < script""", "False"),
        ("""printf '"$@"\\n:\\n' | sh -s "$@\"""", "False"),
    ],
)
def test_what_a_shell_gives(shell: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "content").write_text("one\ntwo\n")
    (tmp_path / "empty").touch()
    assert asked(shell, tmp_path) == said.split()


def test_a_pipe_with_content(tmp_path: Path) -> None:
    # The command begins when the writer has written.
    shell = 'echo content | { sleep 0.5; exec "$@"; }'
    assert asked(shell, tmp_path) == ["True"]


def test_a_program_that_calls_the_command_gives_it_input() -> None:
    with subprocess.Popen(ASK, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write("content")
        process.stdin.flush()
        assert process.communicate(timeout=60)[0].split() == ["True"]


def test_a_script_has_what_its_runner_gives_it(tmp_path: Path) -> None:
    # As cron and CI runners do: the commands of a script inherit its standard input.
    assert asked('"$@"; :', tmp_path, stdin=None, input="content") == ["False"]
