# SPDX-License-Identifier: BSD-3-Clause
"""Runs one command under torchrun and under a host process, in the same folder, and keeps all that can be compared.

What torchrun does is taken from a recording, unless a test or the run wants the real one (see ``recording``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conformance import recording
from tests.conformance.recording import Places, Recording, Stored
from tests.fork_server import Forked, server
from tests.local.hosts import Hosts
from tests.ports import free_port
from tests.waits import WITHIN, until

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

TIMEOUT = WITHIN
"""Seconds that one launch may take."""


class Job(NamedTuple):
    """A launch that is under way.

    Attributes:
        pids: of the launchers, one a host.
        work: where they run.
        under: ``torchrun`` or ``host``.
        notes: what is found meanwhile and is to be in the outcome; JSON.
    """

    pids: list[int]
    work: Path
    under: str
    notes: dict[str, Any]

    def await_marks(self, *marks: str) -> None:
        """Wait until ranks have made these marks."""
        path = self.work / "marks"
        made = lambda: path.exists() and set(marks) <= set(path.read_text().splitlines())  # noqa: E731
        until(made, f"{marks} under {self.under}")

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
        err: what the caller gets on stderr, of all hosts.
        files: what is in the working folder, by relative path; compiled files without their content.
        reports: what the ranks reported, by rank.
        error: the job's torchelastic error file.
        notes: what was found while it was under way.
    """

    under: str
    codes: list[int]
    out: bytes
    err: bytes
    files: dict[str, bytes]
    reports: dict[int, Any]
    error: Any
    notes: dict[str, Any]

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


class Launchers:
    """Runs commands under both.

    Args:
        recorded: knows what torchrun does.
        test: by which the recording knows the test's cases.
        folder: for the working folder and what is observed.
        monkeypatch: sets environment and working folder of both.
        ranks: run option ``ranks`` of the host process.
    """

    def __init__(
        self,
        recorded: Recording,
        test: str,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        ranks: str,
    ) -> None:
        self.ranks = ranks
        self._recorded = recorded
        self._test = test
        self._cases = 0
        self._made: list[tuple[str, str, Stored]] = []
        self._places = Places(folder)
        self._work, self._observed, self._console = (folder / name for name in ("work", "observed", "console"))
        self._error_file = folder / "error.json"
        self._patch = monkeypatch
        self._stdin = os.devnull
        monkeypatch.setenv("OBSERVED", str(self._observed))
        # As when the cases were recorded: or the working folder holds compiled files, too.
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(self._error_file))

    def port(self) -> str:
        """A TCP port that nobody has now, whose number is not recorded."""
        port = str(free_port())
        self._places.add(port, "⟦port⟧")
        return port

    def script(
        self, body: str, *options: str, nproc: int = 2, args: Sequence[str] = (), first: str = "", **rest: Any
    ) -> Pair:
        """Run a script of the given text with ``report``, ``mark`` and ``wait_for``; ``first`` stands before."""
        text = first + REPORT + textwrap.dedent(body)
        words = ["--nproc-per-node", str(nproc), *options, "prog.py", *args]
        return self(words, {"prog.py": text, **rest.pop("files", {})}, **rest)

    def each(self, bodies: Sequence[str], *options: str, **rest: Any) -> Pair:
        """Run a script of its own on each rank, with the same at hand."""
        files = {f"prog{rank}.py": REPORT + textwrap.dedent(body) for rank, body in enumerate(bodies)}
        return self(["--nproc-per-node", str(len(bodies)), *options, "prog${local_rank}.py"], files, **rest)

    def __call__(
        self,
        words: Sequence[str],
        files: Mapping[str, str | bytes],
        *,
        environ: Mapping[str, str | None] | None = None,
        prepare: Callable[[Path], None] | None = None,
        during: Callable[[Job], None] | None = None,
        preload: str = "auto",
        cwd: str = ".",
        stdin: str = os.devnull,
        nodes: int = 1,
        rdzv: str = "c10d",
        live: bool = False,
        name: str = "",
    ) -> Pair:
        """Run ``torchrun WORDS`` under both, one after the other, in a folder that holds ``files`` and nothing else.

        Args:
            words: torchrun's command line.
            files: text or bytes by relative path.
            environ: variables to set, or with None to unset.
            prepare: does what is left to do in the folder.
            during: called while the launch is under way.
            preload: modules that the zygote imports under the host process; ``none`` for none; empty for none that
                matters, so that ranks are forks of a zygote if the option ``--ranks`` says so.
            cwd: where to start, relative to the folder.
            stdin: what torchrun has as stdin; a host process has none, as under every backend.
            nodes: how many hosts, with a launcher each; the options with which several meet are added to the words.
            rdzv: torchrun's rendezvous backend of more hosts than one.
            live: run torchrun in any case, for what is to be seen depends on the machine.
            name: by which the recording knows a case that several tests share; empty for one of this test's own.
        """
        for variable, value in (environ or {}).items():
            self._patch.delenv(variable, raising=False) if value is None else self._patch.setenv(variable, value)

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
            commands = [[*_meeting(nodes, node, rdzv, port), *words] for node in range(nodes)]
            notes: dict[str, Any] = {}
            codes, out, err = launch(commands, during, preload, notes)
            out, err = recording.without_lines(out), recording.without_lines(err)
            return Outcome(under, codes, out, err, _tree(self._work), self._reports(), self._error(), notes)

        if live:
            return Pair(run("torchrun"), run("host"))
        self._cases += 1
        name = name or (self._test if self._cases == 1 else f"{self._test} {self._cases}")
        rest = [cwd, stdin, nodes, rdzv]
        given = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        case = recording.fingerprint(words, files, environ or {}, [prepare, during], rest, self._places)
        if self._recorded.live:
            theirs = run("torchrun")
            self._made.append((name, case, recording.pack(vars(theirs), given, self._places)))
        else:
            theirs = Outcome("torchrun", **recording.unpack(self._recorded.find(name, case), given, self._places))
        return Pair(theirs, run("host"))

    def keep(self) -> None:
        """Hand the cases of a test that has passed to the recording."""
        for made in self._made:
            self._recorded.keep(*made)

    def _under_torchrun(
        self, words: list[list[str]], during: Callable[[Job], None] | None, preload: str, notes: dict[str, Any]
    ) -> tuple[list[int], bytes, bytes]:
        consoles = [(self._console / f"out{node}", self._console / f"err{node}") for node in range(len(words))]
        processes: list[Forked] = []
        for args, (out, err) in zip(words, consoles, strict=True):
            out.touch()
            err.touch()
            streams = str(self._stdin), str(out), str(err)
            processes.append(server("torchrun").start(args, os.environ, os.getcwd(), *streams))
        try:
            if during:
                during(Job([process.pid for process in processes], self._work, "torchrun", notes))
            codes = [process.wait(TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [b"".join(path.read_bytes() for path in paths) for paths in zip(*consoles, strict=True)]
        return codes, texts[0], texts[1]

    def _under_host(
        self, words: list[list[str]], during: Callable[[Job], None] | None, preload: str, notes: dict[str, Any]
    ) -> tuple[list[int], bytes, bytes]:
        folder = Path(tempfile.mkdtemp(prefix="h"))
        environ = {"TORCHELASTIC_ERROR_FILE": str(self._error_file)}
        modules = {"none": "", "": "json" if self.ranks == "fork" else ""}.get(preload, preload)
        command, options = ["torchrun", *words[0]], ("--preload", modules, "--ranks", self.ranks, "--debug-wait", "0")
        hosts = Hosts(folder, command, len(words), options, environ).start()
        processes = [hosts.processes[node] for node in range(len(words))]
        try:
            if during:
                during(Job([process.pid for process in processes], self._work, "host", notes))
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
        return [process.wait() for process in processes], out, err

    def _reports(self) -> dict[int, Any]:
        return {int(path.name): json.loads(path.read_text()) for path in self._observed.iterdir()}

    def _error(self) -> Any:
        return json.loads(self._error_file.read_text())["message"] if self._error_file.exists() else None


def _meeting(nodes: int, node: int, rdzv: str, port: int) -> list[str]:
    """The options with which the launchers of several hosts find each other; ours are replicas, and ignore most."""
    if nodes == 1:
        return []
    where = ["--rdzv-backend", rdzv, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    return ["--nnodes", str(nodes), "--node-rank", str(node), *where]


def _tree(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): b"" if path.suffix == ".pyc" else recording.without_lines(path.read_bytes())
        for path in paths
    }
