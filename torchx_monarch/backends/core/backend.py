# SPDX-License-Identifier: BSD-3-Clause
"""The interface of a backend: what ``schedulers.monarch.MonarchScheduler`` needs to run apps somewhere.

A backend renders, submits, reads, stops and removes; it decides nothing. What follows from what it reads is decided in
one place for all of them (``core.state``), and the scheduler implements TorchX's ``describe``, ``list``, ``log_iter``,
``cancel`` and ``delete`` from it.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torchx.specs import AppDef, CfgVal, runopts
from torchx.workspace import WorkspaceMixin

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import StateAccessError
from torchx_monarch.backends.core.options import MonarchOpts, NetworkOpts, run_options
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, TimedLines
from torchx_monarch.backends.core.snapshot import LogQuery as LogQuery
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.model.env_names import replica0_variable

Cfg = Mapping[str, CfgVal]
O = TypeVar("O", bound=MonarchOpts)  # noqa: E741
R = TypeVar("R")
S = TypeVar("S", bound=AppSnapshot)
T = TypeVar("T")
U = TypeVar("U")

_log = logging.getLogger("torchx_monarch")


def read_undamaged(items: Iterable[T], read: Callable[[T], U | None]) -> list[U]:
    """Read items for a list; leave out what is None, and with a warning what is damaged or belongs to another user."""
    found = []
    for item in items:
        try:
            result = read(item)
        except (state_files.DamagedFileError, StateAccessError) as error:
            _log.warning("%s", error)
            continue
        if result is not None:
            found.append(result)
    return found


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.

    Attributes:
        one_host_role: whether only the first role may have hosts, because replicas learn no address but that of the
            first role's replica 0.
        waits_for_cancel: whether ``torchx cancel`` waits for the app's end; otherwise it returns immediately.
        kills: whether ``stop`` can kill immediately. Where it cannot, ``remove`` also ends what still runs, within the
            grace period that it has.
        separate_streams: whether it keeps a replica's stdout and stderr apart.
        shares_interpreter: whether its replicas find the submitter's Python interpreter at the same path.
        limits_resources: whether a replica gets the CPUs and GPUs that its role asks for and no more.
        supervises: whether a process of this package outside the hosts supervises replicas, and runs ``on_end``.
        needs_owner: whether no process of a job ends what is left of it once it is decided (``schedulers.owner``).
        needs_image: whether replicas run in container images, so that those of hosts must have this package; a backend
            for which that depends on run options overrides ``Backend.runs_images``.
    """

    one_host_role: bool = False
    waits_for_cancel: bool = False
    kills: bool = True
    separate_streams: bool = True
    shares_interpreter: bool = False
    limits_resources: bool = False
    supervises: bool = False
    needs_owner: bool = False
    needs_image: bool = False


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of ``torchx monarch doctor``.

    Attributes:
        value: what was found; empty if nothing was.
        advice: why jobs cannot run, and how to fix it; empty if nothing is wrong.
    """

    what: str
    value: str = ""
    advice: str = ""

    @property
    def level(self) -> str:
        return "fail" if self.advice else "ok"

    def line(self) -> str:
        """Return the result as one line of text."""
        found = "; ".join(filter(None, (self.value, self.advice)))
        return f"{self.level:4}  {self.what}: {found}"


class Backend(abc.ABC, Generic[O, R, S]):
    """A place where apps run.

    The type parameters are its run options, its request and its snapshot of an app.

    Attributes:
        options: its run options; ``NetworkOpts`` among its bases if hosts reach each other over a network.
        retired_options: what to use instead of run options that it has no more, by their names.
        capabilities: what it can do.
        poll: seconds between two checks while waiting for an app's end.
        workspace: builds workspaces into images or folders; None if the backend does not take workspaces along. The
            images of a builder with a push step (``dryrun_push_images``) are pushed before ``submit``.
    """

    options: type[O]
    retired_options: ClassVar[Mapping[str, str]] = {}
    capabilities: ClassVar[Capabilities] = Capabilities()
    poll: ClassVar[float] = 1.0
    workspace: WorkspaceMixin[Any] | None = None

    @property
    def has_network(self) -> bool:
        """Whether hosts reach each other over a network; otherwise they share one machine and one user."""
        return issubclass(self.options, NetworkOpts)

    def run_opts(self) -> runopts:
        """Return the run options of the backend and its workspaces."""
        options = run_options(self.options)
        if self.workspace is not None:
            options.update(self.workspace.workspace_opts())
        return options

    # -- submitting ----------------------------------------------------------------------------------------------------

    def check_options(self, options: O) -> None:
        """Check the run options before a workspace is built, which may take long.

        Raises:
            InvalidRunConfigException: a value is not allowed, which the exception names as TorchX does.
            UserError: a value is not allowed, or two options exclude each other.
            BackendError: an option needs a configured backend for its check, and there is none.
        """

    def runs_images(self, options: O) -> bool:
        """Return whether replicas run in container images under these run options."""
        return self.capabilities.needs_image

    def makes_mounts(self, options: O) -> bool:
        """Return whether replicas get the mounts of their roles under these run options."""
        return self.runs_images(options)

    def checks(self, options: O) -> Iterable[CheckResult]:
        """Check that apps can run here with the run options, for ``torchx monarch doctor``. Submit nothing.

        Raises:
            BackendError: the place where apps run cannot be reached.
        """
        return ()

    def replica0_host(self, app: AppDef, role: int) -> str:
        """Return the name by which all replicas of a role reach its replica 0. Called only if ``has_network``.

        It may contain macros. ``@NAME`` stands for the value of the environment variable NAME on each host. If that is
        unset on replica 0, or ``localhost``, it is the host's own machine.

        By default it is ``@`` and the variable of ``env_names.replica0_variable``, which the backend then sets.
        """
        return f"@{replica0_variable(role)}"

    @abc.abstractmethod
    def render(self, app: AppDef, submitted: SubmittedApp, options: O) -> R:
        """Return the request that runs an app; a dry run shows it.

        Args:
            app: the app to run: as submitted, with the host process before each rank command.
            submitted: the app as the user wrote it, to be stored with it, and what is known of its roles.

        Raises:
            ValueError: the backend cannot run the app; the message says what is allowed.
        """

    def show(self, request: R) -> str:
        """Return a request as text for ``torchx run --dryrun``."""
        return str(request)

    @abc.abstractmethod
    def submit(self, request: R, submitted: SubmittedApp, credentials: str) -> str:
        """Submit a request and return the app's id. Leave nothing behind if that fails.

        Args:
            request: the request, perhaps changed by the user since it was rendered. It is not changed.
            submitted: as for ``render``.
            credentials: the secret that hosts expect in the environment variable ``env_names.CREDENTIALS``; empty
                without a network.
        """

    # -- reading -------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def snapshot(self, app_id: str, *, brief: bool = False) -> S | None:
        """Read the state of an app; return None if the app does not exist.

        Args:
            brief: leave out what costs further requests and only describes: error files, numbers of restarts.
        """

    @abc.abstractmethod
    def snapshots(self, options: Cfg) -> Sequence[S]:
        """Read the state of all apps of this backend, briefly.

        Args:
            options: the run options of ``torchx list``, which may select some of the apps; may be empty.
        """

    @abc.abstractmethod
    def read_log(self, app: S, role: str, replica: int, query: LogQuery[S]) -> Iterable[TimedLines]:
        """Yield lines of the log of a replica that exists, in the order in which they were written."""

    def folder(self, app_id: str) -> state_files.AppPaths | None:
        """Return the folder of an app with its request, events and logs; None if this machine does not have it."""
        return None

    def still_runs(self, app: S) -> bool:
        """Return whether an app still runs although its state is terminal: its files may be ahead."""
        return False

    def has_ended(self, app_id: str) -> bool | None:
        """Return whether an app has ended or does not exist, for frequent calls; None to derive it from a snapshot."""
        return None

    def await_change(self, app_id: str, seconds: float) -> None:
        """Wait until an app may have ended, at most so many seconds; by default ``poll`` seconds."""
        time.sleep(min(seconds, self.poll))

    # -- ending --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def stop(self, app: S, outcome: Outcome, grace: float | None) -> None:
        """Begin to end what is left of an app, and return immediately.

        Args:
            outcome: why it ends; the backend stores it where the state would not follow from the replicas alone. An
                outcome that is stored already takes precedence.
            grace: seconds from SIGTERM to SIGKILL, where the backend allows a choice; 0 to kill immediately; None for
                the app's run option.
        """

    @abc.abstractmethod
    def remove(self, app: S) -> None:
        """Remove all that the backend stores of an app that has ended, or could not be ended in time."""

    def close(self) -> None:
        """Close connections."""
