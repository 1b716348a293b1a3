# SPDX-License-Identifier: BSD-3-Clause
"""Programs without the time of their imports: a process that has imported a program forks for each start of it.

Each start is a process with its own session, environment, folder and streams, as where a shell starts it. A fork keeps
the interpreter's settings, so ``fits`` excludes environments that would change them.

Run as a script with the name of a program (``_PROGRAMS``). A line on stdin is a start, ``{"args", "env", "cwd",
"streams"}``, the last the paths of stdin, stdout and stderr, and answered by its process; or ``{"wait": process}``,
answered by the exit code when it has ended.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar


def _of_interpreter(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how an interpreter starts."""
    names = ("PYTHON", "LD_", "LANG", "LC_")
    return {name: env[name] for name in env if name.startswith(names) and name != "PYTHONDONTWRITEBYTECODE"}


_AT_START = _of_interpreter(os.environ)
"""Of the interpreter of the servers."""


class Forked:
    """A process that a fork server has started: the part of ``subprocess.Popen`` that tests use.

    Attributes:
        pid: its process id.
        returncode: its exit code, negative for a signal; None until it was asked for after the end.
    """

    def __init__(self, pid: int, ended: Callable[[int], int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            self.returncode = self._ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return its exit code."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Signal the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send the process SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts a program in forks of a process that has imported it. That process starts with the first of them.

    Args:
        program: a name in ``_PROGRAMS``.
    """

    _forks: ClassVar[list[Forked]] = []
    """The processes that were started, of all servers: /proc shows none of their environment."""

    def __init__(self, program: str) -> None:
        self._program = program

    @functools.cached_property
    def _process(self) -> subprocess.Popen[bytes]:
        # It outlives the test that is the first to need it, and must not be taken for one of that test's processes.
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHX_MONARCH_")}
        env = {**{name: env[name] for name in env if name not in _of_interpreter(env)}, **_AT_START}
        command = [sys.executable, __file__, self._program]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env, cwd="/")

    @classmethod
    def running(cls) -> dict[int, str]:
        """Return the processes that have not ended, of all servers, and what they are."""
        cls._forks[:] = [fork for fork in cls._forks if fork.poll() is None]
        return {fork.pid: "a fork of tests/fork_server.py" for fork in cls._forks}

    @staticmethod
    def fits(env: Mapping[str, str]) -> bool:
        """Return whether an interpreter that starts with this environment would be as the server's is."""
        return _of_interpreter(env) == _AT_START

    def start(self, args: Sequence[str], env: Mapping[str, str], cwd: str, stdin: str, out: str, err: str) -> Forked:
        """Start the program.

        Args:
            args: its arguments.
            env: its whole environment.
            cwd: its working folder.
            stdin: path of the file that it reads.
            out: path of the file to which it appends its stdout.
            err: the same of its stderr.
        """
        request = {"args": list(args), "env": dict(env), "cwd": cwd, "streams": [stdin, out, err]}
        self._forks.append(Forked(self._ask(request), self._wait))
        return self._forks[-1]

    def close(self) -> None:
        """End the server."""
        if "_process" not in vars(self):
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _wait(self, pid: int) -> int:
        return self._ask({"wait": pid})

    def _ask(self, request: Mapping[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            data = self._process.stdout.read(1)
            assert data, f"the fork server of {self._program} has ended"
            line += data
        return int(line)


def _serve() -> list[str]:
    """Answer requests until there are no more; return, in the fork alone, the arguments of a start."""
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            for number, path in enumerate(request["streams"]):
                descriptor = os.open(path, os.O_RDWR)
                if number:
                    os.lseek(descriptor, 0, os.SEEK_END)  # without O_APPEND, which ranks would find on their streams
                os.dup2(descriptor, number)
                os.close(descriptor)
            args: list[str] = request["args"]
            return args
        print(pid, flush=True)
    os._exit(0)


def _torchrun() -> None:
    from torch.distributed.run import main

    main(_serve())


def _host() -> None:
    import torchx_monarch.host.batch_run
    import torchx_monarch.host.host_process
    import torchx_monarch.host.live_runs  # noqa: F401
    from torchx_monarch.host.__main__ import main

    main(_serve())


_PROGRAMS = {"torchrun": _torchrun, "host": _host}


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    _PROGRAMS[sys.argv[1]]()
