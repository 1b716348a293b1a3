# SPDX-License-Identifier: BSD-3-Clause
"""``torchx run dist.torchrun``: the same command with ``-s local_cwd``, which runs torchrun, and with ours."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.test_environment import DIFFERENT
from tests.ports import free_port

ARGUMENTS = [
    *("--x=a b\"c,$d", "", "it's", "$HOME", "${HOME}", "100$$", "é\n", "*", "a\\b", ";", "&& false", "`id`", "$(id)"),
    *("#c", "~", "!", "%s", "r${local_rank}", "--", "-j", "--wait"),
]  # fmt: skip

PROGRAM = """
import json, os, signal, sys, time
rank = os.environ["RANK"]
with open(f"part.{rank}", "w") as file:
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    json.dump({"argv": sys.argv, "env": dict(os.environ), "path": sys.path, "blocked": blocked}, file)
os.rename(f"part.{rank}", f"seen.{rank}")
if rank == "1" and sys.argv[1] == "fail":
    for _ in range(1200):  # its end is the end of rank 0
        time.sleep(0.05 * (not os.path.exists("seen.0")))
    sys.exit(3)
"""

SCHEDULERS = {"TORCHX_JOB_ID", "TORCHX_INTERNAL_SESSION_ID", "MONARCH_JOB", "PET_LOG_DIR", "PATH", "_"}
"""Variables by which the app and its scheduler are told. ``local_cwd`` puts the working folder into PATH."""


def torchx_run(scheduler: str, folder: Path, *words: str, preload: str = "torch") -> tuple[int, dict[int, Any]]:
    """The exit code of ``torchx run --wait``, and what the ranks have seen."""
    work = folder / "work"
    work.mkdir()
    (work / "prog.py").write_text(PROGRAM)
    options = ["-s", scheduler, *(["-cfg", f"preload={preload}"] if scheduler == "monarch_local" else [])]
    command = [sys.executable, "-m", "torchx.cli.main", "run", *options, "--wait", "dist.torchrun", *words]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, timeout=240, check=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    seen = {int(path.suffix[1:]): json.loads(path.read_text()) for path in work.glob("seen.*")}
    work.rename(folder / scheduler)
    return done.returncode, seen


@differs(Difference.BLOCKED)
@pytest.mark.parametrize(
    ("ending", "code", "preload"),
    [pytest.param("end", 0, "torch", marks=pytest.mark.nightly("5 s of processor time")), ("fail", 1, "none")],
)
def test_arguments_and_exit_code(ending: str, code: int, preload: str, tmp_path: Path) -> None:
    words = ["-j", "1x2", "--script", "prog.py", "--", ending, *ARGUMENTS]
    schedulers = ("local_cwd", "monarch_local")
    theirs, ours = (torchx_run(scheduler, tmp_path, *words, preload=preload) for scheduler in schedulers)
    assert theirs[0] == ours[0] == code
    assert sorted(theirs[1]) == sorted(ours[1]) == [0, 1]
    for rank in range(2):
        assert ours[1][rank]["argv"] == theirs[1][rank]["argv"]
        assert ours[1][rank]["path"] == theirs[1][rank]["path"]
        assert (theirs[1][rank]["blocked"], ours[1][rank]["blocked"]) == ([signal.SIGUSR2], [])


@pytest.mark.nightly("6 s of processor time; two hosts are compared with torchrun itself every time")
def test_environment_of_two_hosts(tmp_path: Path) -> None:
    words = ["-j", "2x1", "--rdzv_port", str(free_port()), "--script", "prog.py", "--", "end"]
    schedulers = ("local_cwd", "monarch_local")
    theirs, ours = (torchx_run(scheduler, tmp_path, *words, preload="none") for scheduler in schedulers)
    assert theirs[0] == ours[0] == 0
    for rank in range(2):
        their, our = theirs[1][rank]["env"], ours[1][rank]["env"]
        different = {name for name in {*their, *our} if their.get(name) != our.get(name)}
        # Where nobody has set it, it is "x" there and "1" here.
        assert different - {"PYTHONUNBUFFERED"} == {*DIFFERENT, *SCHEDULERS, "TORCHELASTIC_USE_AGENT_STORE"}
