# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler that runs apps on this machine and forgets nothing about them.

Every question is answered from the app's folder, so it does not matter which process asks: the one that submitted the
app, another shell, or one after a reboot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pprint
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers.api import (
    DescribeAppResponse,
    ListAppResponse,
    Scheduler,
    Stream,
    StructuredOpts,
)
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppState, CfgVal, ReplicaStatus, RoleStatus, runopts

from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.local import appdef, folder, logs, owners, render, request, state, state_files, submit
from torchx_monarch.backends.local.request import DetachedRequest
from torchx_monarch.backends.local.status import AppRecord
from torchx_monarch.backends.local.submit import StateAccessError
from torchx_monarch.backends.options import run_options
from torchx_monarch.backends.validation import check_replica, matching
from torchx_monarch.insight import events

_log = logging.getLogger("torchx_monarch")

#: Seconds between two looks at the status of an app that is waited for.
_POLL = 0.02
#: Looks at the status file for one look at the processes.
_LOOKS_PER_TRUTH = 25
#: Seconds that ending an app may take beyond its grace: hosts have some extra, and much memory takes time to free.
_END_EXTRA = 20.0


@dataclass
class DetachedOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of the detached local scheduler."""

    grace: int = 30
    """Seconds that a replica has between SIGTERM and SIGKILL when the app is cancelled, retried or has failed."""

    lease: int = 30
    """Seconds for which a host or its agent may be silent, stopped or hung, until it counts as lost."""

    auto_set_cuda_visible_devices: bool = False
    """Divide this machine's GPUs between the replicas by setting CUDA_VISIBLE_DEVICES."""


class DetachedScheduler(Scheduler[DetachedOpts]):  # type: ignore[misc]
    """Runs each replica as a process on this machine, under a supervisor that outlives whoever submitted the app.

    The replicas run in the current folder, or in ``role.image`` where that is a folder. Requested CPUs and memory are
    not enforced. Everything about an app lies in one folder below the state directory (see ``store``) until it is
    deleted or pruned (see ``prune``).
    """

    def __init__(self, session_name: str) -> None:
        super().__init__("detached", session_name)

    def _run_opts(self) -> runopts:
        return run_options(DetachedOpts)

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, CfgVal]) -> None:
        """Resources are not enforced here, so roles without any are welcome."""

    # --- submitting

    def _submit_dryrun(self, app: AppDef, cfg: DetachedOpts) -> AppDryRunInfo[DetachedRequest, DetachedOpts]:
        made = render.render(
            app,
            grace=cfg.grace,
            assign_gpus=cfg.auto_set_cuda_visible_devices,
            environ=os.environ,
            lease=cfg.lease,
        )
        return AppDryRunInfo(made, _show)

    def schedule(self, dryrun_info: AppDryRunInfo[DetachedRequest, DetachedOpts]) -> str:
        """Start the app and return its id, which is the request's unless an app of that id exists.

        Raises:
            StateDirError: the state directory cannot be written; nothing was started.
            SubmitError: the supervisor could not be started; nothing is left of the app.
        """
        if dryrun_info.app is None:
            raise ValueError("the dry run carries no AppDef; it must come from submit_dryrun()")
        return submit.submit(dryrun_info.request, dryrun_info.app, dict(dryrun_info.cfg or {}))

    # --- looking

    def _find(self, app_id: str) -> tuple[state_files.AppPaths, AppRecord] | None:
        if not state_files.is_app_id(app_id):
            return None
        paths = state_files.app_paths(app_id)
        record = _look(paths)
        return (paths, record) if record is not None else None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        found = self._find(app_id)
        if found is None:
            return None
        paths, record = found
        submitted = appdef.load(paths.app, paths.trusted)
        app = submitted.app if submitted else AppDef(record.name)
        watching = state.watched_by(paths)
        happened, _ = events.read(paths.events)
        hostname = watching.machine.hostname if watching else os.uname().nodename
        return DescribeAppResponse(
            app_id=app_id,
            state=AppState[record.state],
            # Those of the backend, and those of the ranks within one start of it, which the job itself reports.
            num_restarts=record.restarts + sum(event["kind"] == "rank_restart" for event in happened),
            msg=record.msg or NONE,
            structured_error_msg=record.error or NONE,
            ui_url=Path(paths.root).as_uri(),
            metadata=app.metadata,
            roles_statuses=[
                RoleStatus(
                    role.name,
                    [
                        ReplicaStatus(
                            id=replica.id,
                            state=AppState[replica.state],
                            role=role.name,
                            hostname=hostname,
                            structured_error_msg=replica.error or NONE,
                        )
                        for replica in role.replicas
                    ],
                )
                for role in record.roles
            ],
            roles=app.roles,
        )

    def describe_native(self, app_id: str) -> AppDryRunInfo[DetachedRequest, DetachedOpts] | None:
        """The request as it was submitted; None when there is no such app, or what is kept of it is damaged."""
        if not state_files.is_app_id(app_id):
            return None
        paths = state_files.app_paths(app_id)
        submitted, rendered = appdef.load(paths.app, paths.trusted), _request(paths)
        if rendered is None or submitted is None:
            return None
        info: AppDryRunInfo[DetachedRequest, DetachedOpts] = AppDryRunInfo(rendered, _show)
        info.app = submitted.app
        known = DetachedOpts()
        info.cfg = DetachedOpts.from_cfg({name: value for name, value in submitted.cfg.items() if name in known})
        return info

    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """All apps in the state directory, the newest first; a warning names what is not the caller's.

        Raises:
            StateAccessError: the state directory is somebody else's.
        """
        try:
            app_ids = [*state_files.app_ids(), *state.removed_but_running(state_files.apps_dir())]
        except OSError as error:
            raise StateAccessError.of(error, state_files.apps_dir()) from None
        records = []
        for app_id in app_ids:
            try:
                record = _look(state_files.app_paths(app_id))
            except StateAccessError as error:
                _log.warning("%s", error)
                continue
            if record is not None:
                records.append(record)
        records.sort(key=lambda record: record.created, reverse=True)
        return [ListAppResponse(r.app_id, AppState[r.state], name=r.name) for r in records]

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """The lines of one replica's log; the combined log unless a stream is named. A line's time is right to 0.1 s.

        Raises:
            ValueError: there is no such app, role or replica, or the regular expression is none.
        """
        found = self._find(app_id)
        if found is None:
            raise UserError(f"there is no app {app_id!r} in {state_files.apps_dir()}")
        paths, record = found
        sizes = {role.name: len(role.replicas) for role in record.roles}
        check_replica(app_id, sizes, role_name, k)

        def ended() -> bool:
            now = state.truth(paths)
            return now is None or now.terminal

        lines = logs.lines(
            paths.replica_logs(role_name, k),
            (streams or Stream.COMBINED).value,
            since=since,
            until=until,
            ended=ended,
            follow=should_tail and not record.terminal,
            below=paths.trusted,
        )
        return matching(lines, regex)

    def events_path(self, app_id: str) -> Path:
        """The app's events file (see ``torchx_monarch.insight.events``)."""
        return Path(state_files.app_paths(app_id).events)

    def wait_terminal(self, app_id: str, timeout: float) -> bool:
        """Wait until the app has ended, for at most ``timeout`` seconds; whether it has (or does not exist)."""
        deadline = time.monotonic() + timeout
        paths = state_files.app_paths(app_id)
        looks = 0
        while True:
            now = _look(paths) if looks % _LOOKS_PER_TRUTH == 0 else state.recorded(paths)
            if now is None and looks % _LOOKS_PER_TRUTH:
                now = _look(paths)  # a removed app may still run
            if now is None or now.terminal:
                return True
            if time.monotonic() >= deadline:
                return False
            looks += 1
            time.sleep(_POLL)

    # --- ending

    def stop(self, app_id: str, grace: float | None) -> None:
        """Ask for the end of the app and return at once; an app that has ended, or does not exist, is left alone.

        Args:
            grace: seconds from SIGTERM to SIGKILL; 0 kills now; None is the app's own run option.

        Raises:
            RuntimeError: the app runs on another machine.
        """
        found = self._find(app_id)
        if found is None:
            return
        paths, record = found
        # Whatever the files say, a supervisor that runs is told.
        if not state.supervisors(paths):
            if record.terminal:
                return
            watching = state.watched_by(paths)
            if watching is not None and watching.life(watching.supervisor) is owners.Life.ELSEWHERE:
                raise RuntimeError(f"app {app_id} runs on {watching.machine.hostname}; it can only be cancelled there")
        state.ask_to_end(paths, grace)

    def _cancel_existing(self, app_id: str) -> None:
        """End the app; returns when it has ended, as ``LocalScheduler`` does, or when it should have and has not.

        Raises:
            RuntimeError: the app runs on another machine.
        """
        found = self._find(app_id)
        if found is not None and not found[1].terminal:
            self._end(found[0])

    def _end(self, paths: state_files.AppPaths) -> bool:
        """Ask for the end of an app and wait for it, for its grace and some seconds; whether it has ended."""
        rendered = _request(paths)
        self.stop(paths.app_id, None)
        grace = rendered.grace if rendered else float(DetachedOpts.grace)
        return self.wait_terminal(paths.app_id, grace + _END_EXTRA)

    def _delete_existing(self, app_id: str) -> None:
        """Remove everything about an app, after ending it if it runs.

        Raises:
            RuntimeError: it could not be ended.
        """
        found = self._find(app_id)
        if found is None:
            return
        paths, record = found
        if not record.terminal and not self._end(paths):
            raise RuntimeError(f"app {app_id} has been told to end but still runs; its folder {paths.root} is kept")
        folder.remove_app(paths)


def _look(paths: state_files.AppPaths) -> AppRecord | None:
    """The state of an app as it is now; None when there is no such app.

    Raises:
        StateAccessError: there is something by that name that is not a folder of the caller's.
    """
    try:
        paths.check_owner()
    except FileNotFoundError:
        return state.without_folder(paths)
    except NotADirectoryError:
        return None
    except OSError as error:
        raise StateAccessError.of(error, paths.root) from None
    return state.truth(paths)


def _request(paths: state_files.AppPaths) -> DetachedRequest | None:
    """The request of an app; None when there is none, or it is damaged."""
    with contextlib.suppress(state_files.DamagedFileError):
        return request.load(paths)
    return None


def _show(rendered: DetachedRequest) -> str:
    return pprint.pformat(asdict(rendered), indent=2, width=80, sort_dicts=False)


def create_scheduler(session_name: str, **kwargs: Any) -> DetachedScheduler:
    """TorchX's factory; it touches neither disk nor network. Parameters meant for other schedulers are ignored."""
    return DetachedScheduler(session_name)
