# SPDX-License-Identifier: BSD-3-Clause
"""torchx commands without half a second of imports each: a process that has imported the command forks for each.

Each command is a process with its own environment, folder and streams, as where a shell starts it. tests/packaging
runs the installed command, and tests that signal a command, or have a terminal, start it themselves.

Run as a script with the descriptor of a socket. A message is a command, ``{"args", "env", "cwd"}`` with the descriptors
of stdin, stdout, stderr and a network namespace; answered by its process, and by its exit code when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn


class TorchxServer:
    """Runs torchx commands in forks of a process that has imported torchx, one at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._control = ours
        # It outlives the test that is the first to need it, and must not be taken for a process of that test or of its
        # cluster, which are known by their variables; each command has its own.
        env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL") if name in os.environ}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # TorchX colours what it prints where this is a terminal when it is imported
            env=env,
            cwd="/",
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self._close)

    def run(self, args: Sequence[str], env: Mapping[str, str], cwd: str, streams: Sequence[int], seconds: float) -> int:
        """Run a command and return its exit code, as ``subprocess`` tells it.

        Args:
            args: after ``torchx``.
            env: its whole environment.
            cwd: its working folder.
            streams: the descriptors of its stdin, stdout and stderr. Its network is that of the calling thread.
            seconds: after which it is killed.

        Raises:
            TimeoutExpired: it was killed.
        """
        request = json.dumps({"args": list(args), "env": dict(env), "cwd": cwd}).encode()
        with self._lock, open("/proc/thread-self/ns/net", "rb") as network:
            socket.send_fds(self._control, [request], [*streams, network.fileno()])
            pid = int(self._control.recv(64))
            ended, _, _ = select.select([self._control], [], [], seconds)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            code = int(self._control.recv(64))
        if not ended:
            raise subprocess.TimeoutExpired(["torchx", *args], seconds)
        return code

    def _close(self) -> None:
        self._control.close()
        self._process.wait()


_server = functools.cache(TorchxServer)

_IMPORTED = {
    "monarch_aws_batch": ("torchx_monarch.backends.aws_batch.backend",),
    "monarch_docker": ("torchx_monarch.backends.docker.backend",),
    # The client of Kubernetes imports its models one by one when they are needed, this one with most others.
    "monarch_kubernetes": ("torchx_monarch.backends.kubernetes.backend", "kubernetes.client.models:V1Pod"),
    "monarch_slurm": ("torchx_monarch.backends.slurm.backend",),
    "monarch_ssh": ("torchx_monarch.backends.ssh.backend",),
}
"""What the server imports before the first command with the name of a scheduler in one of its words."""


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
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "rb"))
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        streams = [file.fileno() for file in (null, out, out if merged else err)]
        environ = os.environ if env is None else env
        code = _server().run(words, environ, str(cwd or Path.cwd()), streams, seconds)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode().replace("\r\n", "\n"))
    done = subprocess.CompletedProcess(["torchx", *words], code, *texts)
    if check:
        done.check_returncode()
    return done


def _serve(control: socket.socket) -> list[str]:
    """Answer commands until the other end is closed; return, in the fork alone, the arguments of a command."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not data:
            os._exit(0)
        request = json.loads(data)
        for scheduler, names in _IMPORTED.items():
            if any(scheduler in word for word in request["args"]):
                for name in names:
                    pkgutil.resolve_name(name)
        pid = os.fork()
        if pid == 0:
            control.close()
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
            *streams, network = descriptors
            _enter(network)
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
                os.close(descriptor)
            args: list[str] = request["args"]
            return args
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())
        control.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _enter(network: int) -> None:
    """Enter a network namespace, unless this process is in it, and close its descriptor."""
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


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


if __name__ == "__main__":
    sys.path[0] = ""  # as with `python -m torchx.cli.main`
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
    gc.freeze()
    sys.argv = ["torchx", *_serve(socket.socket(fileno=int(sys.argv[1])))]
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
