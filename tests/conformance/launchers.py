# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs one command under torchrun and under a host process, in the same folder, and keeps all that can be compared."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.local.hosts import Hosts

REPORT = textwrap.dedent("""
    import json, os, sys
    def report(value):
        with open(os.path.join(os.environ["OBSERVED"], os.environ["RANK"]), "w") as file:
            json.dump(value, file)
    def mark(text):
        with open("marks", "a") as file:
            file.write(f"{os.environ['RANK']} {text}\\n")
    def wait_for(path):
        import time
        until = time.monotonic() + 60
        while not os.path.exists(path):
            assert time.monotonic() < until, path
            time.sleep(0.01)
    def rest():
        import time
        for _ in range(1200):
            time.sleep(0.05)  # a signal that comes just before a long sleep would be handled after it
""")
"""Stands before a script: ``report`` what it sees as JSON, ``mark`` a moment in a file that all ranks share."""

LOGS = ("--log-dir", "logs", "--redirects", "3", "--rdzv-id", "job")
"""Options with which every byte that a rank prints is in ``Outcome.log``."""

TIMEOUT = 100.0
"""Seconds that one launch may take."""


class Job(NamedTuple):
    """A launch that is under way.

    Attributes:
        pids: of the launchers, one a host.
        work: where they run.
        under: ``torchrun`` or ``host``.
    """

    pids: list[int]
    work: Path
    under: str

    def await_marks(self, *marks: str) -> None:
        """Wait until ranks have made these marks."""
        path, until = self.work / "marks", time.monotonic() + TIMEOUT
        while not path.exists() or not set(marks) <= set(path.read_text().splitlines()):
            assert time.monotonic() < until, f"{self.under}: waited in vain for {marks}"
            time.sleep(0.02)

    def signal(self, number: int, node: int = 0) -> None:
        """Signal a launcher, as a scheduler or a terminal would."""
        os.kill(self.pids[node], number)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a launch leaves.

    Attributes:
        under: ``torchrun`` or ``host``.
        codes: exit codes of the launchers, one a host, negative for a signal.
        out: what the caller gets on stdout, of all hosts.
        err: what the caller gets on stderr, likewise.
        files: what is in the working folder, by relative path; compiled files without their content.
        reports: what the ranks reported, by rank.
        error: the job's torchelastic error file.
    """

    under: str
    codes: list[int]
    out: bytes
    err: bytes
    files: dict[str, bytes]
    reports: dict[int, Any]
    error: Any

    @property
    def code(self) -> int:
        """The exit code of the launcher on the first host."""
        return self.codes[0]

    def log(self, rank: int, stream: str) -> bytes | None:
        """A rank's file in the log folder; None when there is none."""
        found = [path for path in self.files if re.fullmatch(rf"logs/[^/]+/attempt_0/{rank}/{stream}", path)]
        return self.files[found[0]] if found else None

    def marks(self) -> list[str]:
        """The marks of the ranks, in time."""
        return self.files.get("marks", b"").decode().splitlines()

    def rank_code(self) -> int:
        """The exit code of the rank that torchrun says failed first, negative for a signal; 0 for none."""
        found = re.search(rb"Root Cause.*?exitcode\s*: (-?\d+)", self.err, re.DOTALL)
        assert self.under == "torchrun" and (found or self.code == 0), self.err.decode(errors="replace")
        return int(found[1]) if found else 0


class Pair(NamedTuple):
    """The outcomes of the same command."""

    theirs: Outcome
    ours: Outcome


class TorchrunServer:
    """Starts torchrun in forks of a process that has imported it (see ``torchrun_server``)."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("torchrun_server.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def start(self, launch: Mapping[str, Any]) -> int:
        """Start a launch; returns its process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(launch).encode() + b"\n")
        return self._number()

    def wait(self, pid: int) -> int:
        """The exit code of a launch; ended by force when it takes too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"wait": pid}).encode() + b"\n")
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        code = self._number()
        assert ready, "torchrun does not end"
        return code

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _number(self) -> int:
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            data = self._process.stdout.read(1)
            assert data, "the torchrun server has ended"
            line += data
        return int(line)


class Launchers:
    """Runs commands under both.

    Args:
        server: starts torchrun.
        folder: for the working folder and what is observed.
        monkeypatch: sets environment and working folder of both.
    """

    def __init__(self, server: TorchrunServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._work, self._observed, self._console = (folder / name for name in ("work", "observed", "console"))
        self._error_file = folder / "error.json"
        self._patch = monkeypatch
        self._stdin = os.devnull
        monkeypatch.setenv("OBSERVED", str(self._observed))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(self._error_file))

    def script(self, body: str, *options: str, nproc: int = 2, args: Sequence[str] = (), **rest: Any) -> Pair:
        """Run a script of the given text with ``report``, ``mark`` and ``wait_for`` at hand."""
        text = REPORT + textwrap.dedent(body)
        words = ["--nproc-per-node", str(nproc), *options, "prog.py", *args]
        return self(words, {"prog.py": text, **rest.pop("files", {})}, **rest)

    def __call__(
        self,
        words: Sequence[str],
        files: Mapping[str, str | bytes],
        *,
        environ: Mapping[str, str | None] | None = None,
        prepare: Callable[[Path], None] | None = None,
        during: Callable[[Job], None] | None = None,
        preload: str = "torch",
        cwd: str = ".",
        stdin: str = os.devnull,
        nodes: int = 1,
        rdzv: str = "c10d",
    ) -> Pair:
        """Run ``torchrun WORDS`` under both, one after the other, in a folder that holds ``files`` and nothing else.

        Args:
            words: torchrun's command line.
            files: text or bytes by relative path.
            environ: variables to set, or with None to unset.
            prepare: does what is left to do in the folder.
            during: called while the launch is under way.
            preload: modules that rank interpreters import ahead under the host process.
            cwd: where to start, relative to the folder.
            stdin: what torchrun has as stdin; a host process has none, as under every backend.
            nodes: how many hosts, with a launcher each; the options with which several meet are added to the words.
            rdzv: torchrun's rendezvous backend of more hosts than one.
        """
        for name, value in (environ or {}).items():
            self._patch.delenv(name, raising=False) if value is None else self._patch.setenv(name, value)

        def run(under: str) -> Outcome:
            for folder in (self._work, self._observed, self._console):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            self._error_file.unlink(missing_ok=True)
            for path, content in files.items():
                (self._work / path).parent.mkdir(parents=True, exist_ok=True)
                (self._work / path).write_bytes(content.encode() if isinstance(content, str) else content)
            if prepare:
                prepare(self._work)
            self._patch.chdir(self._work / cwd)
            self._stdin = stdin
            launch = self._under_torchrun if under == "torchrun" else self._under_host
            port = free_port()
            each = [[*_meeting(nodes, node, rdzv, port), *words] for node in range(nodes)]
            codes, out, err = launch(each, during, preload)
            return Outcome(under, codes, out, err, _tree(self._work), self._reports(), self._error())

        return Pair(run("torchrun"), run("host"))

    def _under_torchrun(
        self, words: list[list[str]], during: Callable[[Job], None] | None, preload: str
    ) -> tuple[list[int], bytes, bytes]:
        consoles = [(self._console / f"out{node}", self._console / f"err{node}") for node in range(len(words))]
        pids, codes = [], []
        for args, (out, err) in zip(words, consoles, strict=True):
            out.touch()
            err.touch()
            files = {"stdin": self._stdin, "stdout": str(out), "stderr": str(err)}
            pids.append(self._server.start({"args": args, "env": dict(os.environ), "cwd": os.getcwd(), **files}))
        try:
            if during:
                during(Job(pids, self._work, "torchrun"))
        finally:
            codes = [self._server.wait(pid) for pid in pids]
        texts = [b"".join(path.read_bytes() for path in paths) for paths in zip(*consoles, strict=True)]
        return codes, texts[0], texts[1]

    def _under_host(
        self, words: list[list[str]], during: Callable[[Job], None] | None, preload: str
    ) -> tuple[list[int], bytes, bytes]:
        folder = Path(tempfile.mkdtemp(prefix="h"))
        environ = {"TORCHELASTIC_ERROR_FILE": str(self._error_file)}
        command, options = ["torchrun", *words[0]], ("--preload", preload)
        hosts = Hosts(folder, command, len(words), options, environ).start()
        processes = [hosts.processes[node] for node in range(len(words))]
        try:
            if during:
                during(Job([process.pid for process in processes], self._work, "host"))
            for process in processes:
                process.wait(TIMEOUT)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out, err = (
            b"".join((hosts.logs(node) / name).read_bytes() for node in hosts.processes) for name in ("out", "err")
        )
        shutil.rmtree(folder)
        return [process.returncode for process in processes], out, err

    def _reports(self) -> dict[int, Any]:
        return {int(path.name): json.loads(path.read_text()) for path in self._observed.iterdir()}

    def _error(self) -> Any:
        return json.loads(self._error_file.read_text())["message"] if self._error_file.exists() else None


def free_port() -> int:
    """A TCP port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _meeting(nodes: int, node: int, rdzv: str, port: int) -> list[str]:
    """The options with which the launchers of several hosts find each other; ours are replicas, and ignore most."""
    if nodes == 1:
        return []
    where = ["--rdzv-backend", rdzv, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    return ["--nnodes", str(nodes), "--node-rank", str(node), *where]


def _tree(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): b"" if path.suffix == ".pyc" else path.read_bytes() for path in paths}
