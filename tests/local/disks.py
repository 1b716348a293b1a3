# SPDX-License-Identifier: BSD-3-Clause
"""A disk of its own for the files of hosts, which may be frozen: writes then wait, as where a file server is away."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.waits import WITHIN, until


class Disk:
    """The disk that is mounted on a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def freeze(self) -> None:
        """Have what writes to the disk wait."""
        subprocess.run(["fsfreeze", "--freeze", self._folder], check=True, timeout=WITHIN)

    def thaw(self) -> None:
        """Let it go on."""
        subprocess.run(["fsfreeze", "--unfreeze", self._folder], check=True, timeout=WITHIN)


@contextlib.contextmanager
def mounted(hosts: Hosts, folder: Path) -> Iterator[Disk]:
    """Put a folder onto a disk of its own; the hosts are killed at the end."""
    folder.mkdir(parents=True)
    image, disk = str(hosts.folder / "image"), str(folder)
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, disk]):
        if shutil.which(command[0]) is None or subprocess.run(command, check=False, timeout=WITHIN).returncode:
            pytest.skip(f"needs {' '.join(command)}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=False, timeout=WITHIN, stderr=subprocess.DEVNULL)
        for process in hosts.processes.values():
            process.kill()
            process.wait(WITHIN)
        until(
            lambda: not subprocess.run(["umount", disk], check=False, timeout=WITHIN).returncode, "the disk", every=0.1
        )
