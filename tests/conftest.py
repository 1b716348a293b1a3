# SPDX-License-Identifier: BSD-3-Clause
"""What every test gets: a state folder of its own, and the proof that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import loop_watch
from tests.conformance import recording
from tests.contract import every_time
from tests.fork_server import ForkServer
from tests.waits import WITHIN, until

# Beside test modules, pytest shows the values in failed assertions of these.
pytest.register_assert_rewrite("tests.contract.contract", "tests.contract.place")

# What collection makes stays to the end: scanning it for garbage again and again takes a third of the collection.
gc.disable()

# The same examples in every run, and none that fails because the machine is slow. `--hypothesis-profile=nightly` draws
# new ones and more of them, and says how to repeat what fails.
hypothesis.settings.register_profile("repeatable", max_examples=50, derandomize=True, deadline=None)
hypothesis.settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")

_MARK = "TORCHX_MONARCH_TEST"
"""In the environment of everything that a test starts."""

# These are ignored where the tests were started in the background, or with nohup, and what is ignored stays so in every
# process that a test starts.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks", choices=("fork", "fresh"), default="fork", help="how ranks are started in tests/conformance"
    )
    parser.addoption(
        "--torchrun", choices=("recorded", "live"), default="recorded", help="what is compared with: what was recorded"
    )
    parser.addoption("--image", action="store_true", help="build the image of docker/Dockerfile, which takes minutes")
    parser.addoption("--nightly", action="store_true", help="run also what is marked so")
    parser.addoption("--record-torchrun", metavar="FOLDER", help="for python -m tests.conformance.record")


def pytest_report_header(config: pytest.Config) -> str:
    live = config.getoption("--torchrun") == "live" or config.getoption("--record-torchrun")
    lacks = "" if live else recording.lacking()
    return f"tests/conformance runs the real torchrun, which takes minutes: {lacks}" if lacks else ""


_SHARING = (
    *("clusters/[^/]+/", "packaging/", "conformance/test_process_group.py"),
    "unit/test_documentation.py::test_the_site_",
)
"""Tests that share a cluster, environments, launches or pages, made once in each process that runs some of them."""

_IMPORTING_TORCH = (
    "local/test_digits.py",
    "unit/test_master_endpoint.py",
    "unit/test_options.py",
    "unit/test_step_progress.py",
)
"""Tests that import torch, which each process that runs some of them does for over a second."""

_RUNNING_TORCHRUN = (
    "conformance/test_interpreter.py",
    "conformance/test_stops.py",
    "conformance/test_programs.py::test_as_many_executables",
    "conformance/test_children.py::test_child[signals",
    "conformance/test_children.py::test_child[limits",
)
"""Tests that run the real torchrun every time, from a server that imports torch."""


class _Together(LoadScopeScheduling):  # type: ignore[misc]
    """Gives what shares something to one worker, and every other test to whichever is free; the largest first.

    Not by ``--dist loadgroup``: xdist 3.8 writes the group into a test's ``_nodeid``, which pytest 9.2 does not read.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(tuple(f"tests/{path}::" for path in _IMPORTING_TORCH)):
            return "torch"
        if nodeid.startswith(tuple(f"tests/{path}" for path in _RUNNING_TORCHRUN)):
            return "torchrun"
        found = re.match(f"tests/({'|'.join(_SHARING)})", nodeid)
        return found[0] if found else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _Together(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes long.

    And leave out how the real torchrun behaves, in a run that is not about it, and the tests of the image and nightly
    ones unless they are asked for.
    """
    for item in items:
        if place := getattr(getattr(item, "cls", None), "kind", None):
            every_time.mark(item, place)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    unwanted = set[str]()
    if config.getoption("--torchrun") != "live" and not config.getoption("--record-torchrun"):
        unwanted.add("torchrun")
    if not config.getoption("--image"):
        unwanted.add("image")
    if not config.getoption("--nightly"):
        unwanted.add("nightly")
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        without = set(left_out)
        items[:] = [item for item in items if item not in without]


def pytest_collection_finish() -> None:
    # Each process collects all tests. Torch would take it over a second more, and its 45 loggers would get a handler
    # before each phase of each test; monarch.job, with flask and pyarrow, 0.3 s.
    found = {"torch", "monarch.job"} & sys.modules.keys()
    assert not found, f"a test module imports {found}: import it in the tests that need it"
    gc.freeze()
    gc.enable()


def all_processes() -> frozenset[str]:
    """Return the pids of all processes of the machine, as /proc names them."""
    return frozenset(filter(str.isdigit, os.listdir("/proc")))


def marked_processes(mark: str, older: frozenset[str]) -> dict[int, str]:
    """Return live processes that were started with the mark, and their command lines.

    Args:
        mark: of the test.
        older: pids of processes that are not looked at: to read the environment of all takes milliseconds, and there
            are thousands of tests.
    """
    found: dict[int, str] = {}
    wanted = f"{_MARK}={mark}".encode()
    for pid in all_processes() - older:
        entry = Path("/proc", pid)
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
                if state != b"Z":
                    found[int(pid)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


_FAILED = pytest.StashKey[bool]()


def _gone_within(request: pytest.FixtureRequest) -> float:
    """Seconds that the processes of a test have to go after it: of one that has failed, some may stay for ever."""
    return 20.0 if request.node.stash.get(_FAILED, False) else WITHIN


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Fail a test after which a process that it started is alive, or a socket file of ours is left.

    Listening sockets belong to processes, so those are covered. The folders for state and temporary files are the
    test's own; the latter is short, as paths of sockets must be.
    """
    mark = uuid.uuid4().hex
    older = all_processes()
    short = Path("/tmp", f"tm{mark[:8]}")
    short.mkdir(mode=0o700)
    monkeypatch.setenv(_MARK, mark)
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("HYPERACTOR_EXECUTION_ID", "MONARCH_LOG_SUFFIX", "MONARCH_FILE_LOG"):
        monkeypatch.delenv(name, raising=False)  # of a Monarch that another test has imported here
    yield
    # A supervisor removes its folder last of all.
    deadline = time.monotonic() + _gone_within(request)
    while (alive := {**marked_processes(mark, older), **ForkServer.running()}) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):  # it ends with another one
            os.kill(pid, 9)
    sockets = [str(path) for path in [*short.rglob("*"), *tmp_path.rglob("*")] if path.is_socket()]
    for path in sorted(short.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    short.rmdir()
    assert not alive, f"left running: {alive}"
    assert not sockets, f"sockets left: {sockets}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show with a failure what the jobs of its test have said."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    if report.failed and report.when == "call":
        folders = [Path(os.environ.get("MONARCH_STATE_DIR", "/dev/null"), "apps"), Path(tempfile.gettempdir())]
        report.sections += [(str(path), text) for folder in folders for path, text in _said_by_jobs(folder)]


def _said_by_jobs(folder: Path) -> Iterator[tuple[Path, str]]:
    """The last events of each job below a folder, and the last of our own lines in its logs."""
    for pattern in ("**/events.jsonl", "**/combined.log", "**/err"):
        for path in sorted(folder.glob(pattern))[:20]:
            lines = path.read_text(errors="replace").splitlines()[-2000:]
            ours = [line[:300] for line in lines if line.startswith(("[monarch] ", "{"))]
            if ours:
                yield path, "\n".join(ours[-30:])


@pytest.fixture(autouse=True)
def restores_handlers() -> Iterator[None]:
    """Restore the handlers of signals after a test: TorchX's local scheduler has SIGINT and SIGTERM end the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(request: pytest.FixtureRequest, leaves_nothing: None) -> Iterator[Path]:
    """Yield a folder with a short path, for sockets, logs and events of hosts, which may be ending after the test."""
    path = Path(tempfile.mkdtemp(prefix="h"))
    yield path

    def is_gone() -> bool:
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    waits = path / loop_watch.FILE
    found = waits.read_text() if waits.exists() else ""
    until(is_gone, f"everybody to leave {path}", _gone_within(request))
    assert not found, f"calls on the event loop of a host that may wait for a disk:\n{found}"
