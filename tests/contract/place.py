# SPDX-License-Identifier: BSD-3-Clause
"""A backend on its test system, as the contract uses it: apps through TorchX's Runner, and through its command."""

from __future__ import annotations

import abc
import contextlib
import os
import pkgutil
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torchx.runner import Runner
from torchx.specs import NULL_RESOURCE, AppDef, AppState, AppStatus, BindMount, Role

from tests.fork_server import run_torchx
from tests.waits import WITHIN, until
from torchx_monarch.backends.batch.folder import JobFolder
from torchx_monarch.backends.core.backend import Backend
from torchx_monarch.backends.core.errors import BackendError

TORCHX = [sys.executable, "-c", "import sys; sys.argv[0] = 'torchx'; from torchx.cli.main import main; main()"]
"""The torchx command. Under this name it shows users' mistakes without a traceback."""


def tree(folder: str | Path) -> dict[str, tuple[int, bytes]]:
    """Return when each file and folder below a folder was changed, and the content of the files; empty without it.

    The times of a status and of events are left out: by them a supervisor and replica 0 show that they live.
    """
    found = {}
    for path in [Path(folder), *Path(folder).rglob("*")] if os.path.exists(folder) else ():
        with contextlib.suppress(FileNotFoundError):  # a supervisor writes a file under another name first
            changed = 0 if path.name in ("status.json", "events.jsonl") else path.lstat().st_mtime_ns
            found[str(path)] = changed, path.read_bytes() if path.is_file() else b""
    return found


class Place(abc.ABC):
    """Where the contract's apps run.

    The defaults suit a backend whose replicas see this machine's files and report its name as theirs.

    Args:
        folder: where programs are written.

    Attributes:
        name: name of the scheduler.
        factory: creates the scheduler.
        is_registered: whether the torchx command knows the scheduler.
        plugins_source: how the torchx command finds the scheduler: TorchX's TORCHX_PLUGINS_SOURCE. 1, by the namespace
            package ``torchx_plugins``, does not depend on which version of this package is installed; a package that
            registers entry points needs 2.
        wire: how real the test system is: a key of ``table.WIRES``.
        wires: the same for single scenarios that differ from ``wire``.
        cannot: why the backend, or its test system, cannot do a scenario, by the scenario or by the test's name. The
            tests are skipped with that reason.
        nightly: names of tests that it leaves to the nightly run beside those of ``every_time``.
        cfg: run options of all apps, unless a test sets others.
        long_grace: seconds of grace for ranks that have something to do before their end.
        list_cfg: run options by which ``list`` finds the tests' apps; empty for all apps.
        bad_options: run options that must be refused, each with a regular expression for the message; for all backends.
        own_bad_options: further ones of this backend.
        request_function: the function through which this process asks the backend's system for anything, as
            ``MODULE:NAME``; empty without one.
        package: the Python package of the client library; empty without one.
        install: what the message names when the client library, or tool, is missing.
        names_hosts: whether ``status`` shows the host names that the replicas themselves know.
        keeps_preempted_logs: whether the log of a replica that ``preempt`` takes away stays.
        keeps_events: whether a job's events can be read after its end.
        names_preemptions: whether the hosts' log always tells a preemption from a stop request.
        image: image of all roles.
        resource: resource of all roles, unless a test sets another.
        has_machines: whether its test system has machines that can be lost.
        replaces_machines: whether what has run on a lost machine is started on another one.
        mounts: mounts of all roles: what their image needs to run our programs.
        patience: factor by which timeouts are longer than on a test system of our own.
    """

    name: ClassVar[str]
    factory: ClassVar[Callable[..., Any]]
    is_registered: ClassVar[bool] = True
    plugins_source: ClassVar[str] = "1"
    wire: ClassVar[str] = "real"
    wires: ClassVar[Mapping[str, str]] = {}
    cannot: ClassVar[Mapping[str, str]] = {}
    nightly: ClassVar[Collection[str]] = ()
    cfg: Mapping[str, Any] = {"preload": "none", "grace": 5}
    long_grace: ClassVar[int] = 60
    list_cfg: Mapping[str, Any] = {}
    bad_options: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = (
        ({"grace": -1}, "`grace` is -1; it is a number of seconds"),
        ({"host_timeout": 0}, "`host_timeout` is 0; it is a number of seconds"),
        ({"preflight": "yes"}, "`preflight` is yes; it is off or on or warn"),
        ({"gracce": 1}, "(?s)gracce.*grace"),
        ({"retry_on": "300"}, "`retry_on` is 300: '300' is no exit code"),
    )
    own_bad_options: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()
    request_function: ClassVar[str] = ""
    package: ClassVar[str] = ""
    install: ClassVar[str] = ""
    names_hosts: ClassVar[bool] = True
    keeps_preempted_logs: ClassVar[bool] = True
    keeps_events: ClassVar[bool] = True
    names_preemptions: ClassVar[bool] = True
    patience = 1.0
    image = ""
    resource = NULL_RESOURCE
    has_machines: ClassVar[bool] = False
    replaces_machines: ClassVar[bool] = False
    mounts: Sequence[BindMount] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.schedulers: dict[str, Callable[..., Any]] = {self.name: self.factory}
        self.runner = Runner("torchx", self.schedulers)
        self._handles: list[str] = []

    @property
    def backend(self) -> Backend[Any, Any, Any]:
        """The backend."""
        backend: Backend[Any, Any, Any] = self.runner._scheduler(self.name).inner
        return backend

    # -- apps ----------------------------------------------------------------------------------------------------------

    def program(self, text: str) -> str:
        """Write a program for ranks, and return its path."""
        path = self.folder / f"prog{len(list(self.folder.glob('prog*.py')))}.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    def role(self, entrypoint: str, *args: str, name: str = "trainer", replicas: int = 1, **more: Any) -> Role:
        """Return a role whose replicas can run our programs."""
        more = {"image": self.image, "resource": self.resource, "mounts": list(self.mounts), **more}
        return Role(name, entrypoint=entrypoint, args=list(args), num_replicas=replicas, **more)

    def torchrun(self, *words: str, nproc: int = 2, replicas: int = 2, **more: Any) -> Role:
        """Return a role of ranks."""
        shape = ("--nnodes", str(replicas), "--nproc-per-node", str(nproc), "--tee", "3")
        return self.role("torchrun", *shape, *words, replicas=replicas, **more)

    def run(self, *roles: Role, name: str = "app", workspace: str | None = None, **cfg: Any) -> str:
        """Submit an app, and return its handle."""
        app = AppDef(name, list(roles), {"team": "a b"})
        handle: str = self.runner.run(app, self.name, cfg={**self.cfg, **cfg}, workspace=workspace)
        return self.adopt(handle)

    def submit_and_die(self, *roles: Role) -> str:
        """Submit an app from a process that is killed as soon as it knows the handle; return the handle."""
        read, write = os.pipe()
        submitter = os.fork()
        if submitter == 0:
            try:
                runner = Runner("torchx", self.schedulers)
                os.write(write, runner.run(AppDef("app", list(roles)), self.name, cfg=self.cfg).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.close(write)
        with open(read) as pipe:
            handle = pipe.read()
        os.waitpid(submitter, 0)
        assert handle, "the app was not submitted"
        return self.adopt(handle)

    def submit_script(self, script: Path, *args: str) -> str:
        """Submit a script on two hosts with one rank each by the command that a person types; return the handle."""
        # A rank alone on its host would have a thread for each CPU, and they spin where other processes run.
        shape = ("-j", "2x1", "--env", "OMP_NUM_THREADS=1")
        if not self.is_registered:
            words = [*shape, *self.component_words(), str(script), *args]
            handle: str = self.runner.run_component("monarch.spmd", words, self.name, cfg={})
            return self.adopt(handle)
        command = ("run", "-s", self.name, *self.run_words(), "--workspace", "", "monarch.spmd", *shape)
        return self.adopt(self.torchx(*command, *self.component_words(), str(script), *args).split()[-1])

    def run_words(self) -> Sequence[str]:
        """Return the options of ``torchx run`` that the backend needs."""
        return ()

    def component_words(self) -> Sequence[str]:
        """Return the options of ``monarch.spmd`` that the backend needs."""
        return ()

    def adopt(self, handle: str) -> str:
        """Delete this app, too, at the end of the test."""
        self._handles.append(handle)
        return handle

    # -- reading -------------------------------------------------------------------------------------------------------

    def status(self, handle: str) -> AppStatus:
        """Return the status of an app that exists."""
        status: AppStatus | None = self.runner.status(handle)
        assert status is not None
        return status

    def states(self, handle: str) -> dict[str, AppState]:
        """Return the state of each replica, by ROLE/K."""
        return {f"{r.role}/{r.id}": r.state for role in self.status(handle).roles for r in role.replicas}

    def until(
        self, condition: Callable[[], object], what: str | Callable[[], str], handle: str, seconds: float = WITHIN
    ) -> None:
        """Poll a condition of an app until it holds.

        Args:
            what: what is waited for; a function if the message is to show what it is then.
        """

        def awaited() -> str:
            return f"{what if isinstance(what, str) else what()}\n{self.everything(handle)}\n"

        # Asking for a status costs commands of a batch system, or requests to a server.
        until(condition, awaited, seconds * self.patience, every=0.1)

    def wait(self, handle: str, state: AppState | None = None, seconds: float = WITHIN) -> AppStatus:
        """Wait for the end of an app and return its status, which must have this state."""
        self.until(lambda: self.status(handle).is_terminal(), "the end", handle, seconds)
        status = self.status(handle)
        assert state in (None, status.state), f"{status}\n{self.everything(handle)}"
        return status

    def everything(self, handle: str) -> str:
        """Return what is known of an app, for the message of a failure."""
        status = self.status(handle)
        found = [str(status)]
        for replica in [replica for role in status.roles for replica in role.replicas]:
            with contextlib.suppress(Exception):  # a replica that was removed has no log
                found += [f"== {replica.role}/{replica.id}\n", *self.lines(handle, replica.id, replica.role)]
        return "".join(found)

    def lines(self, handle: str, k: int = 0, role: str = "trainer", **more: Any) -> list[str]:
        """Return the log lines of one replica."""
        return list(self.runner.log_lines(handle, role, k, **more))

    def log(self, handle: str, role: str = "trainer", replicas: int = 2) -> str:
        """Return the logs of all replicas of a role as one text."""
        return "".join(line for k in range(replicas) for line in self.lines(handle, k, role))

    def hostname(self, handle: str, replica: int, role: int = 0) -> str:
        """Return the name of a replica's host as ``status`` shows it."""
        return str(self.status(handle).roles[role].replicas[replica].hostname)

    def described(self, handle: str) -> AppDef:
        """Return the app as a Runner describes it that has not submitted it."""
        with Runner("torchx", self.schedulers) as runner:
            app: AppDef | None = runner.describe(handle)
        assert app is not None
        return app

    def listed(self) -> list[tuple[str, AppState]]:
        """Return handle and state of all apps that a Runner lists that has not submitted them."""
        with Runner("torchx", self.schedulers) as runner:
            return [(entry.app_handle, entry.state) for entry in runner.list(self.name, cfg=self.list_cfg)]

    def facts(self) -> object:
        """Return what reading must not change: by default this machine's state folder and this test's processes.

        The owner of an app (``schedulers.owner``) ends by itself, some seconds after the app.
        """
        mark = os.environ["TORCHX_MONARCH_TEST"].encode()
        processes = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                if command and b"schedulers.owner" not in command and mark in (entry / "environ").read_bytes():
                    processes.add((entry.name, command))
        return tree(os.environ["MONARCH_STATE_DIR"]), processes

    def is_read(self, *request: Any) -> bool:
        """Return whether arguments of ``request_function`` ask for nothing but an answer."""
        raise NotImplementedError

    @contextlib.contextmanager
    def requested_changes(self) -> Iterator[list[str]]:
        """Record what this process asks the backend's system to change during the context."""
        found: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            if self.request_function:
                send = pkgutil.resolve_name(self.request_function)

                def record(*request: Any, **more: Any) -> Any:
                    if not self.is_read(*request):
                        found.append(f"{request} {more}")
                    return send(*request, **more)

                patch.setattr(self.request_function.replace(":", "."), record)
            yield found

    def torchx(self, *words: str, code: int = 0, **environ: str) -> str:
        """Run the torchx command in another folder; return its output, with its errors where it is to fail."""
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        env = {**os.environ, "TORCHX_PLUGINS_SOURCE": self.plugins_source, **environ}
        done = run_torchx(*words, cwd=elsewhere, env=env, seconds=240 * self.patience)
        assert done.returncode == code, f"torchx {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout + (done.stderr if code else "")

    def cancel(self, handle: str) -> None:
        """Cancel an app, from another process if that can know the scheduler."""
        if self.is_registered:
            self.torchx("cancel", handle)
        else:
            self.runner.cancel(handle)

    # -- what happens to apps ------------------------------------------------------------------------------------------

    @property
    def hears(self) -> str:
        """The source of a function ``told(word)`` for programs: whether the test has called ``tell(word)``."""
        return f"def told(word):\n    return os.path.exists(os.path.join({str(self.folder)!r}, 'told-' + word))\n"

    def tell(self, word: str) -> None:
        """Tell the programs a word: lower-case letters, then digits."""
        (self.folder / f"told-{word}").touch()

    def lose(self, handle: str, replica: int) -> None:
        """Take away a replica's host; by default the contract's program kills it when told."""
        self.tell(f"lose{replica}")

    def without_machine(self, handle: str, role: str, replica: int) -> contextlib.AbstractContextManager[None]:
        """Take away the machine of a replica, with all that runs there and without a word, until the context ends."""
        raise NotImplementedError

    def preempt(self, handle: str, replica: int) -> None:
        """Have the backend's system take away a replica, or the whole job, to start it again."""
        raise NotImplementedError

    def pending(self) -> contextlib.AbstractContextManager[str]:
        """Submit an app of ``trainer``, and hold it PENDING until the end of the context, but for its cancellation."""
        raise NotImplementedError

    @contextlib.contextmanager
    def reached(self, handle: str) -> Iterator[str]:
        """Yield HOST:PORT by which a client reaches a job's replica 0; empty if the scheduler tells it."""
        yield ""

    def client(self, handle: str) -> tuple[Sequence[str], str]:
        """Return what puts a job's Monarch client on its hosts' network, and HOST:PORT there of its replica 0.

        Returns:
            Words before the client's command, and the address; empty if the scheduler tells it.
        """
        return (), ""

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the job's credentials as its hosts get them, and all that others can see of the job, as text."""
        raise NotImplementedError

    def left(self, handle: str) -> Sequence[object]:
        """Return what is left of an app that was deleted, beside processes, which each test checks for."""
        return ()

    def message_without_client(self) -> str:
        """Return what the scheduler says on a machine that lacks the client library or tool."""
        if not self.package:
            with pytest.MonkeyPatch.context() as without:
                without.setenv("PATH", "/nonexistent")
                with pytest.raises(BackendError) as caught:
                    self.run(self.role("true"))
            return str(caught.value)
        code = (
            f"import sys; sys.modules[{self.package!r}] = None\nfrom torchx_monarch import schedulers\n"
            f"try: schedulers.{self.name}('torchx')\nexcept ModuleNotFoundError as error: print(error)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
        return done.stdout

    def close(self) -> None:
        """Delete the apps."""
        for handle in self._handles:
            self.runner.delete(handle)
        self.runner.close()


class QueuePlace(Place):
    """A backend whose jobs can wait for slots of a machine."""

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Submit a job behind one that has all slots."""
        role = self.role("sleep", "1000", replicas=2)
        first, second = (self.run(role, slots=len(os.sched_getaffinity(0))) for _ in range(2))
        yield second
        self.runner.cancel(first)


class BatchPlace(Place):
    """A batch system on the base ``torchx_monarch.backends.batch``.

    Attributes:
        submit: the command that submits.
        held: ``submit_args`` that hold a job.
    """

    submit: ClassVar[str]
    held: ClassVar[str]
    own_bad_options = (({"submit_args": "'"}, "`submit_args` is '"),)

    def shown(self) -> str:
        """Return what the batch system shows of its jobs."""
        raise NotImplementedError

    def folder_of(self, handle: str) -> JobFolder:
        """Return the folder of an app."""
        return JobFolder(f"{self.backend.root}/{handle.rpartition('/')[2]}")  # type: ignore[attr-defined]

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the request, and what the batch system and the stored app show."""
        folder = self.folder_of(handle)
        return Path(folder.request).read_text(), self.shown() + Path(folder.app).read_text()

    def left(self, handle: str) -> Sequence[object]:
        """Return the files of the app."""
        return list(Path(self.folder_of(handle).root).rglob("*"))
