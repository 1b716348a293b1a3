# SPDX-License-Identifier: BSD-3-Clause
"""The children of a process: those that it owns, and orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

from tests.waits import WITHIN, until_async
from torchx_monarch.system import children, processes


def forked() -> int:
    return os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)


def test_who_ends_and_who_is_reaped() -> None:
    async def main() -> None:
        child, process = children.start(["sh", "-c", "read x; exit $x"], stdin=subprocess.PIPE)
        orphan, killed = forked(), forked()
        for pid in (orphan, killed):
            os.kill(pid, signal.SIGKILL)
        await until_async(lambda: processes.process(killed) is None, "the end of orphans")
        assert child.is_running
        late = children.Child(killed)  # which was killed before its owner knew its pid
        assert (late.is_running, late.returncode) == (False, -signal.SIGKILL)
        with process:
            assert process.stdin is not None
            process.stdin.write(b"3\n")
        assert await asyncio.wait_for(child.wait(), WITHIN) == 3
        child.send(signal.SIGKILL)  # to nobody: another process may have its pid

    asyncio.run(main())


def test_a_child_that_has_ended_before_it_is_owned() -> None:
    async def main() -> None:
        pid = forked()
        os.kill(pid, signal.SIGTERM)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert await asyncio.wait_for(children.Child(pid).wait(), WITHIN) == -signal.SIGTERM

    asyncio.run(main())
