# SPDX-License-Identifier: BSD-3-Clause
"""Run apps through another TorchX scheduler, which only knows what TorchX's interface says.

Hosts meet at replica 0 of the first role, which TorchX's macro ``rank0_env`` names on every scheduler. So only that
role has hosts. What is submitted is stored on this machine.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, Scheduler, Stream
from torchx.schedulers.local_scheduler import LocalScheduler
from torchx.specs import (
    NONE,
    AppDef,
    AppDryRunInfo,
    AppState,
    InvalidRunConfigException,
    ReplicaStatus,
    Role,
    is_terminal,
    macros,
    runopts,
)
from torchx.workspace import WorkspaceMixin

from torchx_monarch.backends.core import torchx_api
from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery
from torchx_monarch.backends.core.errors import BackendError, SubmitError, UserError
from torchx_monarch.backends.core.options import NetworkOpts, run_options
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot, TimedLines
from torchx_monarch.backends.core.stored_apps import StoredApps
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.exceptions import TorchXMonarchError
from torchx_monarch.model.env_names import CREDENTIALS, FOR_HOSTS
from torchx_monarch.model.host_result import KEY_VARIABLE, HostResult, verified
from torchx_monarch.model.job_result import describe_code
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.system import error_files
from torchx_monarch.system.untrusted_text import one_line

_log = logging.getLogger("torchx_monarch")

_MADE_LATER = {name: f"{name}-is-made-when-the-job-is-submitted" for name in (CREDENTIALS, KEY_VARIABLE)}
"""What stands in a request for the secrets of hosts, by the variable; no quoting changes its characters, nor theirs."""

_LIST_INTERVAL = 10.0
"""Seconds between two lists of all apps, which may be those of all users of a cluster."""


def state(value: AppState) -> State:
    """Return TorchX's state of an app or a replica as ours."""
    queued = value in (AppState.UNSUBMITTED, AppState.SUBMITTED)
    return State.PENDING if queued else State[value.name]


def stored_app(record: Record | None, response: DescribeAppResponse) -> SubmittedApp:
    """Return the app as the user wrote it; as the other scheduler describes it if there is no record."""
    try:
        return SubmittedApp.from_json(record.submitted if record else None)
    except ValueError:
        app = AppDef(response.app_id, list(response.roles), dict(response.metadata))
        return SubmittedApp(app, [RoleSpec.from_role(role) for role in app.roles])


def build(
    record: Record | None,
    submitted: SubmittedApp,
    response: DescribeAppResponse,
    result: str,
    hostname: str,
) -> AppSnapshot:
    """Return the snapshot of an app. Replicas of which nothing is told are in the app's state.

    Args:
        response: the other scheduler's description; UNKNOWN if it does not know the app.
        result: what the hosts, which the first role alone has, have written of their end: JSON text; empty if that is
            not known.
        hostname: the name of the machine of replicas of which nothing is told; empty if it is not known.
    """
    end, now = HostResult.from_text(result), state(response.state)
    if now is State.UNKNOWN and record is not None and record.cancelled:
        now = State.CANCELLED
    elif now is State.UNKNOWN and result and len(submitted.roles) == 1:
        now = State.FAILED if end.code else State.SUCCEEDED
    native, cause = Outcome(now, "" if response.msg == NONE else response.msg), ""
    if now is State.FAILED:
        error = "" if response.structured_error_msg == NONE else response.structured_error_msg
        # The other scheduler's error does not name its role.
        cause = error if error and len(submitted.roles) == 1 else result if end.reason else ""
        if cause:
            native = Outcome(now)
        elif error:
            native = Outcome(now, HostResult.from_text(error).reason, error)
    statuses = {(status.role, status.id): status for role in response.roles_statuses for status in role.replicas}
    roles = []
    for index, spec in enumerate(submitted.roles):
        default = [ReplicaStatus(replica, response.state, spec.name, hostname) for replica in range(spec.replicas)]
        found = [statuses.get((spec.name, status.id), status) for status in default]
        roles.append(RoleSnapshot(spec, [_replica(status, now, "" if index else cause) for status in found]))
    return AppSnapshot(
        response.app_id,
        submitted.app.name,
        roles,
        submitted.app,
        created=record.created if record else 0.0,
        native=native,
        restarts=max(0, response.num_restarts) + end.rank_restarts,
        ui_url=response.ui_url or "",
    )


def _replica(status: ReplicaStatus, app: State, error: str) -> ReplicaSnapshot:
    """Return the snapshot of a replica; ``error`` is the result of its role's hosts, if the app has failed."""
    own, result = state(status.state), HostResult.from_text(error)
    is_cause = bool(error) and status.id == max(0, result.replica)
    return ReplicaSnapshot(
        status.role,
        status.id,
        app if app.is_terminal and not own.is_terminal else own,
        hostname=status.hostname,
        exit_code=result.code if is_cause else None,
        failure=f"replica {status.role}/{status.id} {describe_code(result.code)}" if is_cause and result.code else "",
        error=error if is_cause else "",
        is_error_lost=bool(error) and not is_cause,
    )


@dataclass(frozen=True)
class Record:
    """What is stored of an app.

    Attributes:
        submitted: ``SubmittedApp.to_json``.
        created: when it was submitted, in seconds since the epoch.
        result_key: the key with which its hosts sign their results in the log (``model.host_result``).
        cancelled: whether its scheduler was asked to cancel it.
    """

    submitted: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    result_key: str = ""
    cancelled: bool = False


class _InnerWorkspace(WorkspaceMixin[None]):  # type: ignore[misc]
    """Builds workspaces as the wrapped scheduler does, which pushes its images itself when it submits."""

    def __init__(self, inner: WorkspaceMixin[Any]) -> None:
        super().__init__()
        self._inner = inner

    def build_workspaces(self, roles: list[Role], cfg: Cfg) -> None:
        self._inner.build_workspaces(roles, cfg)


class WrappedBackend(Backend[NetworkOpts, AppDryRunInfo[Any, Any], AppSnapshot]):
    """Has another scheduler run the app, and tells what that scheduler tells.

    An app without a record on this machine is shown as the other scheduler describes it.
    """

    options = NetworkOpts
    capabilities = Capabilities(
        one_host_role=True,
        kills=False,
    )

    def __init__(self, inner: Scheduler[Any], name: str) -> None:
        self.inner = inner
        self.records = StoredApps(Record, "wrapped", name)
        self._name = name
        self.workspace = _InnerWorkspace(inner) if isinstance(inner, WorkspaceMixin) else None
        # One word must not mean two things: what it means on our other schedulers, and what the other one means by it.
        ours = dict(run_options(NetworkOpts))
        if clash := [f"`{option}`" for option, _ in inner.run_opts() if option in ours]:
            raise UserError(
                f"{type(inner).__name__} cannot be wrapped as {name}: torchx-monarch has run options of the same name, "
                f"{', '.join(clash)}; rename them in a subclass (`run_opts`)"
            )
        # Its own methods call `describe`, too: `log_iter`, `exists`, `cancel`.
        self._describe_inner, inner.describe = inner.describe, self._describe
        self._listed: Mapping[str, AppState] = {}
        self._listed_at = -_LIST_INTERVAL

    @contextlib.contextmanager
    def _asking(self, what: str, kind: type[BackendError] = BackendError) -> Iterator[None]:
        """Turn an error of the other scheduler into one line that names it: UserError for a ValueError, else ``kind``.

        A missing method stays TorchX's error.
        """
        try:
            yield
        except (TorchXMonarchError, InvalidRunConfigException, NotImplementedError):
            raise
        except Exception as error:
            raised = UserError if isinstance(error, ValueError) else kind
            reason = one_line(str(error)) or type(error).__name__
            raise raised(f"{self._name}: {type(self.inner).__name__} cannot {what}: {reason}") from error

    def close(self) -> None:
        self.inner.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def run_opts(self) -> runopts:
        options = run_options(NetworkOpts)
        options.update(self.inner.run_opts())
        return options

    def runs_images(self, options: NetworkOpts) -> bool:
        """Return whether the other scheduler builds images for Docker, which then hold the hosts' Python."""
        return any(kind.__name__ == "DockerWorkspaceMixin" for kind in type(self.inner).__mro__)

    def makes_mounts(self, options: NetworkOpts) -> bool:
        """Leave that to the other scheduler."""
        return True

    def replica0_host(self, app: AppDef, role: int) -> str:
        """Return ``@`` and TorchX's macro for replica 0 of the first role."""
        return f"@{macros.rank0_env}"

    def render(self, app: AppDef, submitted: SubmittedApp, options: NetworkOpts) -> AppDryRunInfo[Any, Any]:
        """Return the other scheduler's own dry run, without the secrets of the hosts."""
        cfg = {name: options[name] for name, _ in self.inner.run_opts() if name in options}
        # A scheduler that passes the submitter's environment on must not pass on that of a job around the submitter.
        outer = {name: "" for name in FOR_HOSTS if name in os.environ}
        for role, spec in zip(app.roles, submitted.roles, strict=True):
            role.env = {**outer, **role.env, **(_MADE_LATER if spec.runs_hosts else {})}
        with self._asking("run the app"):
            torchx_api.validate(self.inner, app, cfg)
            return self.inner.submit_dryrun(app, cfg)

    def submit(self, request: AppDryRunInfo[Any, Any], submitted: SubmittedApp, credentials: str) -> str:
        """Have the other scheduler submit its request, with the secrets of the hosts in a copy of it."""
        key = secrets.token_hex()
        info = copy.copy(request)
        with self._asking("submit the app", SubmitError):
            info.request, filled = _filled(request.request, {CREDENTIALS: credentials, KEY_VARIABLE: key})
            if any(spec.runs_hosts for spec in submitted.roles) and not filled:
                raise SubmitError(
                    f"{self._name}: hosts cannot meet: the request of {type(self.inner).__name__}, of the type "
                    f"{type(info.request).__name__}, does not hold their variable {CREDENTIALS} as text"
                )
            app_id: str = self.inner.schedule(info)
        try:
            self.records.store(app_id, Record(submitted.to_json(), time.time(), key))
        except OSError as error:
            _log.warning("The job runs, but the app as you wrote it could not be stored: %s", error)
        return app_id

    # -- reading -------------------------------------------------------------------------------------------------------

    def _describe(self, app_id: str) -> DescribeAppResponse | None:
        """Describe an app of which there is a record by the other scheduler's list, if that cannot read its own answer.

        TorchX's ``slurm`` raises KeyError for a job that waits, is requeued or has just ended (Slurm 22.05). An app
        that is not listed yet is pending.
        """
        try:
            return self._describe_inner(app_id)
        except (LookupError, TypeError, AttributeError) as error:
            if self.records.load(app_id) is None:
                raise
            _log.debug("%s cannot describe %s: %r", self._name, app_id, error)
        if time.monotonic() > self._listed_at + _LIST_INTERVAL:
            self._listed = {}
            with contextlib.suppress(Exception):
                self._listed = {app.app_id: app.state for app in self.inner.list()}
            self._listed_at = time.monotonic()
        return DescribeAppResponse(app_id, self._listed.get(app_id, AppState.PENDING))

    def snapshot(self, app_id: str, *, brief: bool = False) -> AppSnapshot | None:
        """Return what the other scheduler tells of an app; UNKNOWN if it does not know one that has a record."""
        record = self.records.load(app_id)
        with self._asking(f"describe {app_id}"):
            response = self.inner.describe(app_id)
        if response is None and record is None:
            return None
        return self._snapshot(app_id, record, response, brief)

    def snapshots(self, options: Cfg) -> list[AppSnapshot]:
        """Return the apps with a record that the other scheduler lists; all with a record if it cannot list."""
        records = {app_id: record for app_id in self.records.app_ids() if (record := self.records.load(app_id))}
        wanted = {name: options[name] for name, _ in self.inner.run_opts() if name in options}
        try:
            listed = {app.app_id: DescribeAppResponse(app.app_id, app.state) for app in self.inner.list(wanted)}
        except Exception as error:  # TorchX's local schedulers raise Exception
            _log.debug("%s does not list: %s", self._name, error)
            with self._asking("describe its apps"):
                listed = {app_id: self.inner.describe(app_id) for app_id in records}
        return [
            self._snapshot(app_id, records[app_id], response, True)
            for app_id, response in listed.items()
            if app_id in records
        ]

    def _snapshot(
        self, app_id: str, record: Record | None, response: DescribeAppResponse | None, brief: bool
    ) -> AppSnapshot:
        response = replace(response or DescribeAppResponse(state=AppState.UNKNOWN), app_id=app_id)
        submitted, result = stored_app(record, response), ""
        if record is not None and (response.state is AppState.UNKNOWN or (is_terminal(response.state) and not brief)):
            result = self._result(app_id, record, submitted)
        return build(record, submitted, response, result, "localhost" if isinstance(self.inner, LocalScheduler) else "")

    def _result(self, app_id: str, record: Record, submitted: SubmittedApp) -> str:
        """Return the result that the log of replica 0 of the hosts' role holds; empty if it has none, or is gone."""
        with contextlib.suppress(Exception):
            (role,) = (role.name for role in submitted.roles if role.runs_hosts)
            lines = _log_lines(self.inner, app_id, role, 0, LogQuery())
            return error_files.cleaned(verified(lines, record.result_key)[-1])
        return ""

    def read_log(self, app: AppSnapshot, role: str, replica: int, query: LogQuery[AppSnapshot]) -> Iterator[TimedLines]:
        """Yield the lines without the results that hosts have signed for ``_result``."""
        record = self.records.load(app.app_id)
        key = record.result_key if record else ""
        with self._asking(f"read the log of {app.app_id}"):
            for line in _log_lines(self.inner, app.app_id, role, replica, query):
                if not verified([line], key):
                    yield TimedLines(0.0, line)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: AppSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Have the other scheduler cancel the app, with the grace period that it has."""
        with self._asking(f"cancel {app.app_id}"):
            if not self.inner.exists(app.app_id):  # its `cancel` would do nothing, and say nothing
                raise BackendError(
                    f"{self._name}: {type(self.inner).__name__} has no app {app.app_id}: nothing was ended"
                )
            if record := self.records.load(app.app_id):
                with contextlib.suppress(OSError):
                    self.records.store(app.app_id, replace(record, cancelled=True))
            self.inner.cancel(app.app_id)

    def remove(self, app: AppSnapshot) -> None:
        """Have the other scheduler delete the app, or only end it if it has no way to delete."""
        ended = app.native is not None and app.native.state.is_terminal
        if not ended or torchx_api.deletes(self.inner):
            with self._asking(f"delete {app.app_id}"):
                self.inner.delete(app.app_id)
        self.records.remove(app.app_id)


def _filled(request: Any, values: Mapping[str, str]) -> tuple[Any, bool]:
    """Return a copy of a request with values instead of ``_MADE_LATER``, by variable, and whether it has all of these.

    They are looked for in attributes, dictionaries, lists and tuples.
    """
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(request, memo)
    own = {id(part) for part in memo.values()}  # what deepcopy does not copy, such as a logger, is not the request's
    left = set(values)

    def fill(part: Any) -> Any:
        if isinstance(part, str):
            for name in values:
                if _MADE_LATER[name] in part:
                    left.discard(name)
                    part = part.replace(_MADE_LATER[name], values[name])
        elif isinstance(part, tuple):
            parts = map(fill, part)
            part = type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        elif id(part) in own:
            own.discard(id(part))  # an object may refer to one that it is part of
            if isinstance(part, list):
                part[:] = map(fill, part)
            elif isinstance(items := part if isinstance(part, dict) else getattr(part, "__dict__", None), dict):
                items.update({name: fill(item) for name, item in items.items()})
        return part

    return fill(copied), not left


def _log_lines(inner: Scheduler[Any], app_id: str, role: str, replica: int, query: LogQuery[Any]) -> Iterator[str]:
    """Yield the lines of a log; none if there is no log yet, which TorchX's schedulers say by a ``RuntimeError``.

    Of a scheduler that cannot show both streams as one, those of stdout come first unless the log is followed. It
    raises ValueError for a stream that it does not have, and NotImplementedError if it reads no logs.
    """

    def read(stream: Stream) -> Iterator[str]:
        try:
            yield from inner.log_iter(app_id, role, replica, None, query.since, query.until, query.follow, stream)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            _log.debug("no log: %s", error)

    has_begun = False
    try:
        for line in read(Stream(query.stream) if query.stream else Stream.COMBINED):
            has_begun = True
            yield line
    except ValueError:
        if query.stream or has_begun:
            raise
        # TorchX's scheduler for Slurm has two files, and shows stderr alone unless it is told which.
        both = [read(stream) for stream in (Stream.STDOUT, Stream.STDERR)]
        yield from _together(both) if query.follow else itertools.chain(*both)


def _together(sources: Sequence[Iterable[str]]) -> Iterator[str]:
    found: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()

    def read(source: Iterable[str]) -> None:
        try:
            for line in source:
                found.put(line)
        except Exception as error:
            found.put(error)
        found.put(None)

    for source in sources:
        threading.Thread(target=read, args=[source], daemon=True).start()
    left = len(sources)
    while left:
        line = found.get()
        if isinstance(line, Exception):
            raise line
        if line is None:
            left -= 1
        else:
            yield line
