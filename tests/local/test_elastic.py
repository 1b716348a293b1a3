# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Elastic sizes: torchrun's ``--nnodes MIN:MAX``, from the hosts that are there to those that come and go."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.hosts import Hosts

Eventually = Callable[..., object]

NO_PRELOAD = ("--grace", "5", "--preload", "")


@pytest.fixture
def folder(leaves_nothing: None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="h"))
    yield path
    shutil.rmtree(path)


class Job:
    """Hosts of a role of three, two ranks each, whose ranks say who they are and go on until ``finish``."""

    def __init__(self, folder: Path, *torchrun: str, fewest: int = 1, options: tuple[str, ...] = ()) -> None:
        self._go = folder / "go"
        program = folder / "prog.py"
        program.write_text(
            textwrap.dedent(f"""
                import os, sys, time
                names = ["RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "ROLE_RANK",
                         "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
                print("rank " + " ".join(os.environ[name] for name in names), flush=True)
                while not os.path.exists({str(self._go)!r}):
                    time.sleep(0.05)
            """)
        )
        command = ["torchrun", "--nnodes", f"{fewest}:3", "--nproc-per-node", "2", *torchrun, str(program)]
        self.hosts = Hosts(folder, command, replicas=3, options=(*NO_PRELOAD, *options))

    def finish(self) -> list[int]:
        """Let the ranks end; exit codes of the hosts."""
        self._go.touch()
        return self.hosts.wait()

    def kill(self, replica: int) -> None:
        """Lose a host as to the OOM killer."""
        self.hosts.processes[replica].kill()
        self.hosts.processes[replica].wait()
        for sockets in self.hosts.folder.glob("h*/"):  # what it would have removed; the others have no use for names
            if sockets.stat().st_mtime and not any(sockets.glob("in use")):
                pass

    def ranks(self, replica: int) -> list[str]:
        """What the ranks of a replica have printed so far, in the order of attempts and ranks."""
        lines = [line.partition("rank ")[2] for line in self.hosts.out(replica).splitlines()]
        return lines

    def kinds(self, kind: str) -> list[dict[str, object]]:
        return [event for event in self.hosts.events() if event["kind"] == kind]


def ranks(size: int, group: int, groups: int, count: int = 0) -> list[str]:
    """The lines of the two ranks of one host."""
    first = 2 * group
    return [f"{first + i} {size} {group} {groups} {i} {first + i} {size} {count} 0" for i in (0, 1)]
