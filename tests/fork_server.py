# SPDX-License-Identifier: BSD-3-Clause
"""Programs without the time of their imports: a process that has imported a program forks for each start of it.

Each start is a process with its own session, environment, folder and streams, as where a shell starts it. A fork keeps
the interpreter's settings, so ``fits`` excludes environments that would change them. tests/packaging runs the installed
torchx command, and tests that signal a command, or have a terminal, start it themselves.

Run as a script with the name of a program (``_PROGRAMS``). A line on stdin is a start, ``{"args", "env", "cwd",
"streams", "network"}``, answered by its process; or ``{"wait": process}``, answered by the exit code when it has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn


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
        self._lock = threading.RLock()
        atexit.register(self.close)

    @functools.cached_property
    def _process(self) -> subprocess.Popen[bytes]:
        # It outlives the test that is the first to need it, and must not be taken for one of the processes of that test
        # or of its cluster, which are known by their variables.
        env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | _AT_START
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
        """Start the program in the network of the calling thread.

        Args:
            args: its arguments.
            env: its whole environment.
            cwd: its working folder.
            stdin: path of the file that it reads.
            out: path of the file to which it appends its stdout.
            err: the same of its stderr.
        """
        network = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
        request = {"args": list(args), "env": dict(env), "cwd": cwd, "streams": [stdin, out, err], "network": network}
        with self._lock:
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
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                data = self._process.stdout.read(1)
                assert data, f"the fork server of {self._program} has ended"
                line += data
        return int(line)


server = functools.cache(ForkServer)


def run_torchx(
    *words: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = 240.0,
    check: bool = False,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``torchx WORDS`` and return what it printed, as ``subprocess.run`` does.

    Args:
        words: the arguments.
        cwd: its working folder; None for that of this process.
        env: its whole environment; None for that of this process.
        seconds: after which it is killed.
        check: raise CalledProcessError if it fails.
        merged: have stderr in stdout.
    """
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        streams = os.devnull, out.name, out.name if merged else err.name
        command = server("torchx").start(words, os.environ if env is None else env, str(cwd or Path.cwd()), *streams)
        try:
            code = command.wait(seconds)
        finally:
            command.kill()
            command.wait()
        texts = [file.read().decode().replace("\r\n", "\n") for file in (out, err)]
    done = subprocess.CompletedProcess(["torchx", *words], code, *texts)
    if check:
        done.check_returncode()
    return done


def _serve(prepare: Callable[[Sequence[str]], object] = lambda args: None) -> list[str]:
    """Answer requests until there are no more; return, in the fork alone, the arguments of a start.

    Args:
        prepare: is called with the arguments before the fork.
    """
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        prepare(request["args"])
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            _enter(request["network"])
            _, out, err = request["streams"]
            for number, path in enumerate(request["streams"]):
                descriptor = os.open(path, os.O_RDWR)
                if number:
                    os.lseek(descriptor, 0, os.SEEK_END)  # without O_APPEND, which ranks would find on their streams
                os.dup2(descriptor, number)
                os.close(descriptor)
            if out == err:
                os.dup2(1, 2)
            args: list[str] = request["args"]
            return args
        print(pid, flush=True)
    os._exit(0)


def _enter(network: str) -> None:
    """Enter a network namespace, unless this process is in it."""
    with open(network, "rb") as file:
        if os.fstat(file.fileno()).st_ino != os.stat("/proc/self/ns/net").st_ino:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")


def _torchrun() -> None:
    from torch.distributed.run import main

    main(_serve())


def _host() -> None:
    import torchx_monarch.host.host_process
    import torchx_monarch.host.rank_runs  # noqa: F401
    from torchx_monarch.host.__main__ import main

    watch = runpy.run_path(str(Path(__file__).with_name("loop_watch.py")))
    args = _serve()
    if path := os.environ.pop(watch["VARIABLE"], ""):
        watch["install"](path, os.environ["MONARCH_RUN_DIR"])
    main(args)


_IMPORTED = {
    "monarch_aws_batch": ("torchx_monarch.backends.aws_batch.backend",),
    "monarch_docker": ("torchx_monarch.backends.docker.backend",),
    # The client of Kubernetes imports its models one by one when they are needed, this one with most others.
    "monarch_kubernetes": ("torchx_monarch.backends.kubernetes.backend", "kubernetes.client.models:V1Pod"),
    "monarch_slurm": ("torchx_monarch.backends.slurm.backend",),
    "monarch_ssh": ("torchx_monarch.backends.ssh.backend",),
}
"""What the server imports before the first command with the name of a scheduler in one of its words."""


def _import_for(args: Sequence[str]) -> None:
    for scheduler, names in _IMPORTED.items():
        if any(scheduler in word for word in args):
            for name in names:
                pkgutil.resolve_name(name)


def _torchx() -> None:
    from torchx.cli.main import main
    from torchx.runner import config
    from torchx.specs import finder
    from torchx.util import entrypoints
    from yaml import cyaml  # noqa: F401

    import torchx_monarch.backends.local.backend
    import torchx_monarch.cli.main
    import torchx_monarch.cli.torchx_run
    import torchx_monarch.components
    import torchx_monarch.schedulers.monarch  # noqa: F401

    # A `torchx run` asks 26 times, and each time the metadata of all that is installed are read.
    entrypoints.metadata.entry_points = functools.cache(entrypoints.metadata.entry_points)
    finder.get_components()  # kept by TorchX: it reads and checks the source of each component
    sys.path.insert(0, "")  # as with `python -m torchx.cli.main`
    sys.argv = ["torchx", *_serve(_import_for)]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    # Both are read when their modules are imported.
    config.DEFAULT_CONFIG_DIRS[:] = [str(Path.home()), str(Path.cwd())]
    if kube_config := sys.modules.get("kubernetes.config.kube_config"):
        vars(kube_config)["KUBE_CONFIG_DEFAULT_LOCATION"] = os.environ.get("KUBECONFIG", "~/.kube/config")
    ended_with: object = 0
    try:
        main(sys.argv[1:])
    except SystemExit as ended:
        ended_with = ended.code
    _end(ended_with)


def _end(code: object) -> NoReturn:
    """End this process as the interpreter does, except that modules are not taken apart: that takes up to 0.1 s.

    Args:
        code: that of a ``SystemExit``.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


_PROGRAMS = {"torchrun": _torchrun, "host": _host, "torchx": _torchx}


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    _PROGRAMS[sys.argv[1]]()
