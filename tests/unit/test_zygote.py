# SPDX-License-Identifier: BSD-3-Clause
"""Orders to a zygote, which is a real process, without ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import torchx_monarch
from tests.waits import WITHIN, until_async
from torchx_monarch.command.command import parse
from torchx_monarch.host.ranks.leading_statements import Statement
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.host.ranks.zygote import Zygote, ZygoteError, Zygotes
from torchx_monarch.host.ranks.zygote_process import ZygoteProcess, start_early
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import processes

_ZYGOTE_MAIN = str(Path(torchx_monarch.__file__).with_name("host") / "ranks" / "zygote_main.py")

NOTHING = {"op": "import", "mode": "exec", "target": "", "modules": []}


@contextlib.contextmanager
def started(*modules: str, say: Callable[[str], None] = print) -> Iterator[Zygote]:
    command = parse(["torchrun", "x.py"], {})
    assert command is not None
    zygote = Zygote(ZygoteProcess(RunSpec(command, dict(os.environ), modules), 1), say)
    try:
        yield zygote
    finally:
        zygote.close()


def test_a_zygote_ends_as_the_copy_that_goes_on_after_a_rejected_import() -> None:
    async def main() -> None:
        with started("json") as zygote:
            command = parse(["torchrun", "x.py"], {})
            assert command is not None
            zygote.lead(RunSpec(command, {}, ["json"], leading=(Statement("x.py", 3, "import nosuch"),)), 1)
            why = "x.py:3 import nosuch: ModuleNotFoundError: No module named 'nosuch'"
            assert (await zygote.imports())["unshared"] == why
            os.kill(int(Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children").read_text()), signal.SIGKILL)
            with pytest.raises(ZygoteError, match="was killed by signal 9"):
                await zygote.ask(NOTHING)

    asyncio.run(main())


def test_a_module_that_cannot_be_imported_ahead_is_named() -> None:
    async def main() -> None:
        said = asyncio.get_running_loop().create_future()
        with started("nosuch", "json", say=said.set_result) as zygote:
            assert (await zygote.imports())["unsafe"] == ""
            why = "ModuleNotFoundError: No module named 'nosuch'; name an installed module, or preload=torch"
            assert await asyncio.wait_for(said, WITHIN) == f"the ranks' imports: preload=torch+nosuch: {why}"

    asyncio.run(main())


LIMITED = """
import os, resource
resource.setrlimit(resource.RLIMIT_NPROC, ({limit}, {limit}))
if os.geteuid() == 0:  # for whom the limit does not hold
    os.setuid(54321)
"""


@pytest.mark.parametrize("limit", [1, 2])
def test_the_limit_of_processes_is_named(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process beside the zygote, or none beside the middle one."""
    (tmp_path / "limited.py").write_text(LIMITED.format(limit=limit))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> None:
        with started("limited") as zygote:
            assert (await zygote.imports())["unsafe"] == ""
            process, files = Rank(0, 0, lambda: None), os.listdir(f"/proc/{zygote.pid}/fd")
            reached = rf"the limit of processes \(ulimit -u: {limit}, or pids.max of the container\) is reached"
            with pytest.raises(LaunchError, match=f"^cannot start rank 3: {reached}$"):
                await zygote.fork([(process, {"env": {"RANK": "3"}, "python": []})])
            process.discard()
            assert os.listdir(f"/proc/{zygote.pid}/fd") == files

    asyncio.run(main())


def test_the_limit_of_processes_is_named_during_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zygote with a thread that Python does not know forks, to see whether forks have it."""
    thread = "import _thread, time\n_thread.start_new_thread(time.sleep, (60,))"
    (tmp_path / "limited.py").write_text(thread + LIMITED.format(limit=1))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> None:
        with started("limited") as zygote, pytest.raises(ZygoteError, match=r"\) has failed: the limit of processes "):
            await zygote.imports()

    asyncio.run(main())


def test_a_rank_that_is_killed_before_it_has_begun_is_called_so() -> None:
    forks = runpy.run_path(_ZYGOTE_MAIN)["_Forks"]([{}], [], None)
    os.close(forks._writer)  # as the kernel does when the fork is killed
    assert forks._answers() == [{"error": "it was killed before it had begun"}]


def test_the_exit_of_each_rank_is_seen() -> None:
    """More ranks than asyncio's default executor has threads."""

    async def main() -> None:
        processes = [Rank(0, 0, lambda: None) for _ in range(min(32, (os.cpu_count() or 1) + 4) + 1)]
        for process in processes:
            process.begin(os.posix_spawnp("sleep", ["sleep", "300"], os.environ, setsid=True))
            process.release()
        try:
            os.kill(processes[-1].pid, signal.SIGKILL)
            await asyncio.wait_for(processes[-1].wait(), WITHIN)
            assert processes[-1].returncode == -signal.SIGKILL
        finally:
            for process in processes[:-1]:
                process.kill(signal.SIGKILL)
        for process in processes:
            await process.drain()

    asyncio.run(main())


def spec(*words: str, preload: str = "json") -> HostSpec:
    return HostSpec.from_argv(["--app", "app", "--role", "trainer", "--preload", preload, "--", *words])


@pytest.mark.parametrize(
    "options",
    [
        spec("torchrun", "--nosuch", "x.py"),
        spec("sleep", "1"),
        spec("python", "-m", "torchx_monarch.actors"),
        spec("/nosuch/python", "-m", "torch.distributed.run", "x.py"),
        spec("torchrun", "x.py", preload=""),
    ],
    ids=lambda options: f"{' '.join(options.command)} ({','.join(options.preload)})",
)
def test_no_zygote_is_started_early_for(options: HostSpec) -> None:
    assert start_early(options, os.environ) is None


@pytest.mark.parametrize(("nproc", "fits"), [("2", True), ("1", False)])
def test_a_zygote_that_was_started_early_is_used_if_it_fits(
    monkeypatch: pytest.MonkeyPatch, nproc: str, fits: bool
) -> None:
    """That of one rank does not fit two: OMP_NUM_THREADS is set for several."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = spec("torchrun", "--nproc-per-node", nproc, "x.py")
    command = parse(spec("torchrun", "--nproc-per-node", "2", "x.py").command, os.environ)
    assert command is not None
    early = start_early(options, os.environ)
    assert early is not None

    async def main() -> None:
        zygotes = Zygotes(print, early)
        zygote = zygotes.fitting(RunSpec(command, dict(os.environ), options.preload_modules), 2)
        try:
            assert (await zygote.imports())["unsafe"] == ""
            assert (zygote.pid == early.process.pid) == fits
            await until_async(lambda: bool(processes.identity(early.process.pid)) == fits, "the end of the other")
        finally:
            zygote.close()
            # A loop that closes before its children have ended may get SIGCHLD without a file to write it into.
            await until_async(lambda: processes.identity(zygote.pid) is None, "the end of the zygote")

    umask = os.umask(0o022)
    try:
        asyncio.run(main())
    finally:
        os.umask(umask)
