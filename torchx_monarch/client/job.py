# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation: its hosts, its runs, and the Monarch job that it is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torchx.runner import Runner

from torchx_monarch.client.attached_job import CACHE, AttachedJob
from torchx_monarch.client.function import decode_values, encode_call, program
from torchx_monarch.client.hosts import START_TIMEOUT, AllocationStatus, Hosts, say
from torchx_monarch.client.result import RunInfo, RunResult
from torchx_monarch.client.run import Collector, Records, RunHandle, collect_with_interrupts
from torchx_monarch.client.run_options import Output, RunOptions, RunOptionsDict, merge_options, run_request, send_code
from torchx_monarch.client.workspace_sync import SyncMode
from torchx_monarch.exceptions import AllocationError, SPMDError, UnreachableError
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.state import State
from torchx_monarch.system.line_output import LineReader

# After the base class, which prepares this import.
from monarch.job import JobState, JobTrait  # isort: skip

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")

_WORKERS = "workers"
"""The name of the first mesh in each job of ``monarch.job.spmd``."""


class SPMDJob(AttachedJob):
    """Represent a live allocation: the hosts of one role, which wait for runs, and are a Monarch host mesh.

    ``serve`` takes new hosts and returns an ``SPMDJob``; ``SPMDJob.attach`` returns one for hosts that were taken
    elsewhere. As a context manager, it releases the hosts on exit::

        with serve("torchrun --nproc-per-node 4 train.py", scheduler="monarch_slurm") as job:
            job.run_spmd()
            evaluators = job.state().workers.spawn_procs().spawn("evaluator", Evaluator)
            job.run_spmd(["train.py", "--lr", "0.2"])

    Methods that need the hosts wait for them to start and print the reason for waiting on stderr. They raise
    ``AllocationError`` if the hosts have ended or do not start in time, ``UnreachableError`` if they cannot be reached
    and waiting does not help, and ``RefusedError`` if they do not accept the request. An ``SPMDJob`` can be pickled and
    used in another process.

    The class is a Monarch ``JobTrait``: ``state()`` attaches this process to the hosts, and returns a ``JobState`` with
    the HostMesh ``workers``, and one for each role by its name. Actors run beside ranks, and end when this process
    does, or with the hosts. ``dump``, ``job_load``, ``enable_admin``, ``enable_telemetry``, ``remote_mount`` and
    ``gather_mount`` are Monarch's. A cached state of another job is ignored, and its hosts are left alone.

    ``handle``, ``role``, ``workspace`` and ``sync`` are attributes, too.

    Args:
        handle: the app's TorchX handle, ``SCHEDULER://SESSION/APP``, as ``torchx run`` prints it.
        role: name of the role; empty for the first role.
        address: ``HOST:PORT`` at which this machine reaches replica 0, such as the local end of a tunnel; empty to ask
            the scheduler.
        runner: the TorchX runner; None to create one when it is needed.
        workspace: folder with the code. Each run uses its state at the start of the run. None to use the code that the
            hosts have.
        sync: when the hosts get a copy of the workspace; see ``client.workspace_sync.SyncMode``.
        start_timeout: seconds that a method waits for hosts that have not started; None for no limit.
        scheduler: an argument of ``monarch.job.spmd.SPMDJob``, which is refused.
        original_roles: another one.

    Raises:
        ValueError: ``sync`` is not a value of ``client.workspace_sync.SyncMode``.
        TypeError: ``scheduler`` or ``original_roles`` is given, or the name of the scheduler as the role.
    """

    handle: str

    def __init__(
        self,
        handle: str,
        role: str = "",
        address: str = "",
        runner: Runner | None = None,
        workspace: str | None = None,
        sync: SyncMode = "auto",
        start_timeout: float | None = START_TIMEOUT,
        *,
        scheduler: None = None,
        original_roles: None = None,
    ) -> None:
        if scheduler is not None or original_roles is not None or role == handle.partition("://")[0]:
            raise TypeError(
                "SPMDJob takes neither scheduler nor original_roles, as monarch.job.spmd.SPMDJob does: the handle "
                f"names the scheduler, and the hosts know their command. Write SPMDJob.attach({handle!r})"
            )
        RunOptions(sync=sync)  # checks it
        super().__init__(start_timeout)
        self.handle = handle
        self.role = role
        self.workspace = os.path.abspath(os.path.expanduser(workspace)) if workspace else None
        self.sync: SyncMode = sync
        self._role_hosts = Hosts(handle, role, address, runner=runner, start_timeout=start_timeout)

    @classmethod
    def attach(
        cls,
        handle: str,
        role: str = "",
        address: str = "",
        *,
        runner: Runner | None = None,
        workspace: str | None = None,
        sync: SyncMode = "auto",
        start_timeout: float | None = START_TIMEOUT,
    ) -> Self:
        """Return the job with this handle, from any process of a user on a machine that can reach its hosts.

        The job may be a batch job: ``state`` gives its hosts, too, and ``run_spmd`` is refused. The arguments are
        those of the class.

        Raises:
            UnreachableError: this machine has no certificate for the app.
            ValueError: the app has no such role.
        """
        job = cls(handle, role, address, runner=runner, workspace=workspace, sync=sync, start_timeout=start_timeout)
        try:
            job._role_hosts.target  # noqa: B018
        except UnreachableError as error:
            if error.final:
                raise
        return job

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.handle}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # -- the allocation ------------------------------------------------------------------------------------------------

    def status(self) -> AllocationStatus:
        """Return the state of the allocation, from its hosts or, if they cannot be reached, from its scheduler."""
        return self._role_hosts.status()

    def metrics(self, rank: int | None = None) -> list[dict[str, Any]]:
        """Return what a rank has reported over time (``torchx_monarch.progress``), in each attempt of each run.

        Args:
            rank: the rank; None for the first of each attempt that has reported something.

        Returns:
            For each attempt ``role``, ``run``, ``attempt``, ``rank`` and ``points``, as ``torchx monarch metrics
            --json`` prints them. Empty without reports, and if this machine does not see the job's logs.
        """
        return [attempt.to_json() for attempt in self._role_hosts.metrics(rank)]

    def wait_ready(
        self,
        timeout: float | None = START_TIMEOUT,
        on_progress: Callable[[str], None] | None = None,
        warm: bool = False,
    ) -> Self:
        """Wait until a run can start immediately.

        Args:
            timeout: seconds; None for no limit.
            on_progress: called with a line each time the reason for waiting changes; None for no progress lines.
            warm: whether to wait until ranks find torch imported.

        Returns:
            This allocation.
        """
        self._role_hosts.wait(timeout, on_progress, warm)
        return self

    def kill(self) -> None:
        """End the hosts, their runs and actors, by cancelling the app. Does nothing if the app has ended.

        Raises:
            RuntimeError: a mount stays busy (see ``AttachedJob.kill``).
        """
        super().kill()
        self._role_hosts.release()

    def release(self) -> None:
        """Have the hosts end by themselves, with their runs and actors: the app is then SUCCEEDED.

        Waits for their end. Hosts that do not answer, a batch job, and hosts of another role than the app's first are
        ended as by ``kill``: the app ends with its first role alone.
        """
        super().kill()
        status = self._role_hosts.ask_status()
        decides = not self.role or self.role == next(iter(self._role_hosts.app_roles()), "")
        if status is None or status.message or not decides:
            self._role_hosts.release()
        else:
            with contextlib.suppress(AllocationError, UnreachableError):  # they have ended since
                self._role_hosts.ask({"type": "stop"}, wait=False)
            self._wait_for_end()

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run_spmd(
        self,
        script_args: str | Sequence[str] | None = None,
        *,
        options: RunOptions | None = None,
        **changes: Unpack[RunOptionsDict],
    ) -> RunResult:
        """Execute a command on all hosts, and wait for its end.

        Ctrl-C stops the run and keeps the hosts; a second Ctrl-C kills the run. Both raise ``KeyboardInterrupt`` when
        the run has ended. A third Ctrl-C raises it immediately and leaves the run alone.

        Args:
            script_args: what to run, as a list of words or as a string that is split as a shell splits it. One of:
                a script and its arguments, or ``-m``, a module and its arguments, which replace the program of the
                allocation's command and keep its torchrun options; a whole torchrun or Python command; or None for the
                allocation's command unchanged.
            options: the options of the run; None for the defaults of ``RunOptions``.
            **changes: fields of ``RunOptions`` that replace those of ``options``: ``env``, ``nproc``, ``timeout``,
                ``output``, ``cwd``, ``workspace``, ``sync``, ``queue``, ``results``, ``check``, ``on_phase``.

        Returns:
            The result of the run, with the exit code of each rank.

        Raises:
            SPMDError: the run failed or was stopped, and ``check`` is True.
            CodeError: the workspace could not be sent to the hosts.
            KeyboardInterrupt: the user pressed Ctrl-C.
            ValueError: ``script_args`` is empty or has an unclosed quotation, or an option is invalid.
            TypeError: ``RunOptions`` has no such option.
        """
        options = self._options(options, changes)
        request = run_request(script_args, options)
        result = self._wait(request, options, Collector(options.output, options.on_phase))
        if options.check and result.exit_code != 0:
            raise SPMDError(result)
        return result

    def run_spmd_async(
        self,
        script_args: str | Sequence[str] | None = None,
        *,
        options: RunOptions | None = None,
        **changes: Unpack[RunOptionsDict],
    ) -> RunHandle:
        """Start a run on all hosts, and return a handle to it without waiting for its end.

        The arguments are those of ``run_spmd``. The run continues if this process ends; ``follow`` finds it again.

        Returns:
            A handle like ``concurrent.futures.Future``. With ``check``, its ``result`` raises ``SPMDError`` if the run
            failed.

        Raises:
            CodeError: the workspace could not be sent to the hosts.
            ValueError: an argument is invalid, as for ``run_spmd``.
            TypeError: ``RunOptions`` has no such option.
        """
        options = self._options(options, changes)
        records = self._submit(run_request(script_args, options), options)
        return RunHandle(self._role_hosts, records, Collector(options.output, options.on_phase), options.check)

    def run(
        self, function: Callable[..., T], /, *args: Any, options: RunOptions | None = None, **kwargs: Any
    ) -> list[T]:
        """Call a function in each rank, and return what each of them returned::

            losses = job.run(train, 0.1, epochs=3)

        The ranks are those of ``run_spmd``, with the torchrun options of the allocation's command. See
        ``torchx_monarch.run`` for the function, and for what is raised.

        Args:
            function: the function.
            *args: its arguments, for all ranks alike.
            options: the options of the run; None for the defaults of ``RunOptions``. ``check`` has no effect.
            **kwargs: its keyword arguments. For one that is named ``options``, use ``functools.partial``.

        Returns:
            What each rank returned, by rank.
        """
        options = self._options(options, {})
        encoded = encode_call(function, args, kwargs, options)
        request = dataclasses.replace(run_request(program(function), options), function=encoded)
        collector = Collector(options.output, options.on_phase, takes_values=True)
        return decode_values(self._wait(request, options, collector), collector.values, options.results)

    def _submit(self, request: RunRequest, options: RunOptions) -> Records:
        self._role_hosts.wait(self._start_timeout, say)
        request = send_code(self._role_hosts, request, options)
        return Records.request(self._role_hosts, request.to_message())

    def _wait(self, request: RunRequest, options: RunOptions, collector: Collector) -> RunResult:
        with contextlib.closing(self._submit(request, options)) as records:
            return collect_with_interrupts(self._role_hosts, records, collector)

    def _options(self, options: RunOptions | None, changes: RunOptionsDict) -> RunOptions:
        options = merge_options(options, changes)
        if options.cwd:
            return options
        return dataclasses.replace(
            options, workspace=options.workspace or self.workspace, sync=options.sync or self.sync
        )

    def follow(self, run: int | None = None, *, output: Output = "stream", check: bool = True) -> RunHandle:
        """Follow a run that any process has started: receive its output from the beginning, and its result.

        Args:
            run: number of the run; None for the current run or, if no run is active, the last one.
            output: where the output of the ranks goes; see ``Output``.
            check: whether the handle's ``result`` raises ``SPMDError`` if the run failed.

        Raises:
            ValueError: ``output`` has a value that does not exist.
        """
        collector = Collector(output)
        return RunHandle(
            self._role_hosts, Records.request(self._role_hosts, {"type": "follow", "run": run}), collector, check
        )

    def runs(self) -> list[RunInfo]:
        """List the runs that the hosts know, the ended ones first, then the current one and the queue."""
        return self._role_hosts.runs()

    def cancel_run(self, run: int | None = None, kill: bool = False) -> None:
        """Stop a run, and keep the hosts. Does not wait for the end of the run.

        Args:
            run: number of the run; None for the current run.
            kill: whether to send the ranks SIGKILL immediately, instead of SIGTERM and SIGKILL after the grace period.
        """
        self._role_hosts.ask({"type": "end-run", "run": run, "kill": kill})

    def logs(self, rank: int | None = None, follow: bool = False, run: int | None = None) -> Iterator[str]:
        """Yield the lines that the ranks of a run printed on stdout and stderr, in the order of their arrival.

        Args:
            rank: global rank whose lines to yield; None for all ranks.
            follow: whether to wait for new lines until the run ends. Otherwise yield the lines printed so far.
            run: number of the run; None for the current run or, if no run is active, the last one.

        Raises:
            UnreachableError: with ``follow``, a connection broke and was not restored, as when the hosts have ended.
        """
        greeting = {"type": "follow", "run": run, "rank": rank, "wait": follow}
        readers: dict[tuple[int, str], LineReader] = {}
        with contextlib.closing(Records.request(self._role_hosts, greeting)) as records:
            for record in records:
                if record["type"] == "output" and rank in (None, record["rank"]):
                    reader = readers.setdefault((record["rank"], record["stream"]), LineReader())
                    for lines in reader.feed(record["text"].encode(errors="surrogateescape")):
                        yield from lines.decode(errors="replace").removesuffix("\n").split("\n")
        for reader in readers.values():
            if rest := reader.rest():
                yield rest.decode(errors="replace")

    # -- the Monarch job -----------------------------------------------------------------------------------------------

    def state(self, cached_path: str | None = CACHE) -> JobState:
        """Return the host meshes of the job (see ``JobTrait.state``); ``workers`` is that of the first role."""
        state = super().state(cached_path)
        if _WORKERS not in state._hosts:  # and is no key: mounts, telemetry and ``monarch exec --all`` work on each
            setattr(state, _WORKERS, next(iter(state._hosts.values())))
        return state

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: list[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
        **options: Any,
    ) -> None:
        """Mount a folder of this machine on the hosts (see ``JobTrait.remote_mount``).

        Raises:
            ValueError: the job has no such mesh, or the folder no such interpreter.
        """
        super().remote_mount(source, mntpoint, self._roles_of(meshes), python_exe, **options)

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """Mount a folder of the hosts on this machine (see ``JobTrait.gather_mount``).

        Raises:
            ValueError: the job has no such mesh.
        """
        super().gather_mount(remote_mount_point, local_mount_point, self._roles_of(meshes))

    def _roles_of(self, meshes: list[str] | None) -> list[str] | None:
        """Return the roles of meshes: ``workers`` is the first role. Monarch ignores names that it does not find."""
        if meshes is None:
            return None
        roles = [role or _WORKERS for role in self._roles()]
        found = [roles[0] if mesh == _WORKERS and mesh not in roles else mesh for mesh in meshes]
        if wrong := [mesh for mesh in found if mesh not in roles]:
            raise ValueError(f"meshes={meshes!r}: {self.handle} has no {wrong[0]!r}, but {', '.join(roles)}")
        return found

    # -- the abstract methods of JobTrait, and hooks -------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise ValueError(
                f"client_script={client_script!r}: the hosts of {self.handle} run already. Start the script with "
                "MonarchJob.apply(client_script=...), or call state() of this job in it"
            )

    def _state(self) -> JobState:
        return JobState({role or _WORKERS: mesh for role, mesh in self._meshes().items()})

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is the same app, and it has not ended."""
        return isinstance(spec, SPMDJob) and spec.handle == self.handle and self._is_running()

    def _kill(self) -> None:
        self._detach()

    def _may_use(self, cached: JobTrait) -> bool:
        return isinstance(cached, SPMDJob) and cached.handle == self.handle

    def _roles(self) -> list[str]:
        return self._role_hosts.roles()

    def _hosts_of(self, role: str) -> Hosts:
        return (
            self._role_hosts if role == self._roles()[0] else Hosts(self.handle, role, runner=self._role_hosts.runner)
        )

    def _is_running(self) -> bool:
        # The hosts themselves tell it, also through a tunnel.
        return not State(self._role_hosts.status().state).is_terminal
