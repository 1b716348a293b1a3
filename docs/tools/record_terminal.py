# SPDX-License-Identifier: BSD-3-Clause
"""Record a real session in a terminal as a picture: ``python -m docs.tools.record_terminal [NAME ...]``.

Each recording of ``RECORDINGS`` runs its commands one after the other in a pseudo-terminal of its size, in a copy of
``examples`` with a home folder of its own, and writes ``docs/pictures/NAME.svg``. Only the paths of that folder and of
the interpreter are edited: they are shown as ``~`` and ``~/.venv``.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pexpect
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
TIMEOUT = 180
"""Seconds for one command."""

_THEME = TerminalTheme(
    (21, 25, 31),
    (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (126, 231, 135), (227, 179, 65)]
    + [(121, 192, 255), (210, 168, 255), (86, 212, 221), (177, 186, 196)],
    [(110, 118, 129), (255, 161, 152), (172, 242, 188), (255, 212, 112)]
    + [(165, 214, 255), (226, 197, 255), (118, 227, 234), (255, 255, 255)],
)

# As rich's own, without the font that it has a reader's browser fetch.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-family: system-ui, "DejaVu Sans", sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@dataclass(frozen=True)
class Recording:
    """A session to record.

    Attributes:
        commands: what is typed, one after the other.
        columns: width of the terminal.
        rows: height of the terminal, whose last screen is the picture; 0 for all lines.
        files: the content of files beside the examples, by name.
        before: a command that is executed first, and not shown.
        after: a command that is executed last, and not shown.
        keys: what is typed into the last command at the prompts of pdb.
        seconds: when the picture of a command that uses the whole screen is taken; 0 for other commands. It has one
            command, and needs tmux.
    """

    commands: tuple[str, ...]
    columns: int
    rows: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    before: str = "true"
    after: str = "true"
    keys: tuple[str, ...] = ()
    seconds: float = 0


_FAILING_RANK = """\
import torch
from torch import distributed as dist

def read_shard(step):
    if step == 20 and dist.get_rank() == 2:
        raise ValueError(f"shard {step} is empty")

dist.init_process_group("gloo")
for step in range(100):
    read_shard(step)
    dist.all_reduce(torch.ones(64))
"""

_BREAKPOINT = """\
import os

def step(loss, scale):
    if os.environ["RANK"] == "1":
        breakpoint()
    scaled = loss * scale
    return scaled

print("scaled loss", step(0.7, scale=128))
"""

_SLOW_RANK = """\
import os, time, torch
from torch import distributed as dist

dist.init_process_group("gloo")
for step in range(600):
    time.sleep(3.0 if step > 60 and dist.get_rank() == 5 else 0.05)
    dist.all_reduce(torch.ones(64))
    if step % 10 == 0:
        print(f"step {step} loss {2.3 / (step + 1) ** 0.5:.3f}", flush=True)
"""

_STUCK_RANK = """\
import time, torch
from torch import distributed as dist

def read_shard(step):
    time.sleep(1000 if step == 20 and dist.get_rank() == 2 else 0.01)

dist.init_process_group("gloo")
for step in range(100):
    read_shard(step)
    dist.all_reduce(torch.ones(64))
"""

RECORDINGS = {
    "hang": Recording(
        ("torchx monarch status last", "torchx monarch stacks last"),
        96,
        files={"train.py": _STUCK_RANK},
        before="torchx run -s monarch_local -cfg hang_after=3 monarch.spmd --nproc 4 train.py > handle;"
        "until torchx monarch logs last | grep -q 'hang:'; do sleep 0.2; done",
        after="torchx cancel $(cat handle)",
    ),
    "failure": Recording(
        ("torchx monarch status last",),
        96,
        files={"train.py": _FAILING_RANK},
        before="torchx run -s monarch_local monarch.spmd --nproc 4 train.py; torchx monarch wait last",
    ),
    "debug": Recording(
        ("torchx monarch logs last", "torchx monarch debug last"),
        120,
        files={"train.py": _BREAKPOINT},
        before="torchx run -s monarch_local monarch.spmd --nproc 2 train.py;"
        "until torchx monarch debug last --json | grep -q pid; do sleep 0.2; done",
        keys=("w", "p loss, scale", "!scale = 0.5", "n", "p sca\t", "c"),
    ),
    "top": Recording(
        ("torchx monarch top last",),
        80,
        24,
        files={"train.py": _SLOW_RANK},
        before="torchx run -s monarch_local monarch.spmd -j 2x4 train.py > handle;"
        "until torchx monarch logs last | grep -q 'step 60'; do sleep 0.2; done",
        after="torchx cancel $(cat handle)",
        seconds=8.5,
    ),
}


def whole_screen(command: str, columns: int, rows: int, seconds: float, environment: dict[str, str]) -> str:
    """Return what a terminal shows some seconds after the start of a command, which is ended then."""
    socket = f"{environment['HOME']}/tmux"
    tmux = ["tmux", "-S", socket, "-f", "/dev/null"]
    start = ["new-session", "-d", "-x", str(columns), "-y", str(rows), command]
    subprocess.run([*tmux, *start], cwd=environment["PWD"], env=environment, check=True)
    try:
        time.sleep(seconds)
        taken = subprocess.run([*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    return taken.stdout


def typed(command: str, columns: int, environment: dict[str, str], keys: Sequence[str] = ()) -> str:
    """Return what a terminal shows of a command, from its prompt to its last line."""
    shown = io.StringIO()
    child = pexpect.spawn(
        "bash",
        ["-c", command],
        cwd=environment["PWD"],
        env=environment,
        dimensions=(30, columns),
        timeout=TIMEOUT,
        encoding="utf-8",
    )
    child.logfile_read = shown
    for line in keys:
        child.expect_exact("(Pdb) ")
        child.sendline(line)
    child.expect(pexpect.EOF)
    child.close()
    return f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m\n{shown.getvalue()}"


def screen(output: str, columns: int) -> list[Text]:
    """Return the lines of a terminal after a program has written: carriage returns obeyed, long lines folded."""
    lines = []
    for line in output.replace("\r\n", "\n").rstrip("\n").split("\n"):
        text = Text.from_ansi(line.rsplit("\r", 1)[-1])
        text.expand_tabs(8)
        lines += [text[at : at + columns] for at in range(0, len(text), columns)] or [text]
    return lines


def picture(lines: list[Text], columns: int) -> str:
    """Return lines of a terminal as an SVG."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=True, highlight=False, markup=False)
    return console.export_svg(title="torchx-monarch", theme=_THEME, code_format=_SVG, unique_id="terminal")


def run(recording: Recording) -> list[Text]:
    """Run the commands of a recording in a home folder of its own, and return all lines of the terminal."""
    home = Path(tempfile.mkdtemp(prefix="rec-"))
    project = home / "project"
    shutil.copytree(ROOT / "examples", project / "examples")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(home),
        "PWD": str(project),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "TMPDIR": str(home),
    }
    try:
        for name, text in recording.files.items():
            (project / name).write_text(text)
        typed(recording.before, recording.columns, environment)
        if recording.seconds:
            shape = recording.columns, recording.rows
            output = whole_screen(recording.commands[0], *shape, recording.seconds, environment)
        else:
            *first, last = recording.commands
            shown = [typed(command, recording.columns, environment) for command in first]
            output = "\n".join([*shown, typed(last, recording.columns, environment, recording.keys)])
        typed(recording.after, recording.columns, environment)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return screen(output.replace(str(home), "~").replace(sys.prefix, "~/.venv"), recording.columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(RECORDINGS)}")
    names = parser.parse_args().names or list(RECORDINGS)
    for name in names:
        if name not in RECORDINGS:
            parser.error(f"no recording {name}; there are {', '.join(RECORDINGS)}")
        recording = RECORDINGS[name]
        lines = run(recording)[-recording.rows :]
        (PICTURES / f"{name}.svg").write_text(picture(lines, recording.columns))
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
