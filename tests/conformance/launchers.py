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
        until = time.monotonic() + 30
        while not os.path.exists(path):
            assert time.monotonic() < until, path
            time.sleep(0.01)
""")
"""Stands before a script: ``report`` what it sees as JSON, ``mark`` a moment in a file that all ranks share."""

LOGS = ("--log-dir", "logs", "--redirects", "3", "--rdzv-id", "job")
"""Options with which every byte that a rank prints is in ``Outcome.log``."""

TIMEOUT = 40.0
"""Seconds that one launch may take."""


class Job(NamedTuple):
    """A launch that is under way.

    Attributes:
        pid: of the launcher.
        work: where it runs.
        under: ``torchrun`` or ``host``.
    """

    pid: int
    work: Path
    under: str

    def await_marks(self, *marks: str) -> None:
        """Wait until ranks have made these marks."""
        path, until = self.work / "marks", time.monotonic() + TIMEOUT
        while not path.exists() or not set(marks) <= set(path.read_text().splitlines()):
            assert time.monotonic() < until, f"{self.under}: waited in vain for {marks}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Signal the launcher, as a scheduler or a terminal would."""
        os.kill(self.pid, number)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a launch leaves.

    Attributes:
        under: ``torchrun`` or ``host``.
        code: the launcher's exit code, negative for a signal.
        out: what the caller gets on stdout.
        err: what the caller gets on stderr.
        files: what is in the working folder, by relative path; compiled files without their content.
        reports: what the ranks reported, by rank.
        error: the job's torchelastic error file.
    """

    under: str
    code: int
    out: bytes
    err: bytes
    files: dict[str, bytes]
    reports: dict[int, Any]
    error: Any

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
        """The exit code of what was started last; ended by force when it takes too long."""
        assert self._process.stdout is not None
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
            code, out, err = launch(list(words), during, preload)
            return Outcome(under, code, out, err, _tree(self._work), self._reports(), self._error())

        return Pair(run("torchrun"), run("host"))

    def _under_torchrun(
        self, words: list[str], during: Callable[[Job], None] | None, preload: str
    ) -> tuple[int, bytes, bytes]:
        out, err = self._console / "out", self._console / "err"
        out.touch()
        err.touch()
        files = {"stdin": self._stdin, "stdout": str(out), "stderr": str(err)}
        pid = self._server.start({"args": words, "env": dict(os.environ), "cwd": os.getcwd(), **files})
        try:
            if during:
                during(Job(pid, self._work, "torchrun"))
        finally:
            code = self._server.wait(pid)
        return code, out.read_bytes(), err.read_bytes()

    def _under_host(
        self, words: list[str], during: Callable[[Job], None] | None, preload: str
    ) -> tuple[int, bytes, bytes]:
        folder = Path(tempfile.mkdtemp(prefix="h"))
        environ = {"TORCHELASTIC_ERROR_FILE": str(self._error_file)}
        hosts = Hosts(folder, ["torchrun", *words], options=("--preload", preload), environ=environ).start()
        process = hosts.processes[0]
        try:
            if during:
                during(Job(process.pid, self._work, "host"))
            process.wait(TIMEOUT)
        finally:
            process.kill()
            process.wait()
        out, err = ((hosts.logs(0) / name).read_bytes() for name in ("out", "err"))
        shutil.rmtree(folder)
        return process.returncode, out, err

    def _reports(self) -> dict[int, Any]:
        return {int(path.name): json.loads(path.read_text()) for path in self._observed.iterdir()}

    def _error(self) -> Any:
        return json.loads(self._error_file.read_text())["message"] if self._error_file.exists() else None


def _tree(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): b"" if path.suffix == ".pyc" else path.read_bytes() for path in paths}
