# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler that runs apps on this machine and keeps their state on disk.

It answers every query from the app's folder, so any process may ask: the submitter, another shell, or a process after
a reboot.
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

#: Seconds between two checks of an app's status while waiting for its end.
_POLL = 0.02
#: Reads of the status file for each check of the processes.
_READS_PER_PROCESS_CHECK = 25
#: Seconds that an app may take to end beyond its grace period: hosts get some extra, and freeing memory takes time.
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
    """Runs each replica as a process on this machine, under a supervisor that outlives the submitter.

    The replicas run in the current folder, or in ``role.image`` if that is a folder. Requested CPUs and memory are not
    enforced. All data of an app is in one folder below the state directory (see ``state_files``) until it is deleted or
    pruned (see ``prune``).
    """

    def __init__(self, session_name: str) -> None:
        super().__init__("detached", session_name)

    def _run_opts(self) -> runopts:
        return run_options(DetachedOpts)

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, CfgVal]) -> None:
        """Accept roles without resources, because resources are not enforced here."""

    # --- submission

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
        """Start the app and return its id: the request's, or another one if an app of that id exists.

        Raises:
            ValueError: the dry run carries no AppDef.
            StateDirError: the state directory cannot be written; nothing was started.
            SubmitError: the supervisor could not be started; nothing is left of the app.
        """
        if dryrun_info.app is None:
            raise ValueError("the dry run carries no AppDef; it must come from submit_dryrun()")
        return submit.submit(dryrun_info.request, dryrun_info.app, dict(dryrun_info.cfg or {}))

    # --- queries

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
        watching = state.load_owners(paths)
        happened, _ = events.read(paths.events)
        hostname = watching.machine.hostname if watching else os.uname().nodename
        return DescribeAppResponse(
            app_id=app_id,
            state=AppState[record.state],
            # Restarts by the backend, and restarts of the ranks within one start, which the job reports as events.
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
        """Return the request as submitted; None if the app does not exist or its files are damaged."""
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
        """List all apps in the state directory, newest first; warn of folders that belong to other users.

        Raises:
            StateAccessError: another user owns the state directory.
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
        """Return the lines of one replica's log; the combined log if no stream is named. Times are right to 0.1 s.

        Raises:
            ValueError: the app, role or replica does not exist, or the regular expression is invalid.
        """
        found = self._find(app_id)
        if found is None:
            raise UserError(f"there is no app {app_id!r} in {state_files.apps_dir()}")
        paths, record = found
        sizes = {role.name: len(role.replicas) for role in record.roles}
        check_replica(app_id, sizes, role_name, k)

        def ended() -> bool:
            now = state.current_state(paths)
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
        """Return the path of the app's events file (see ``torchx_monarch.insight.events``)."""
        return Path(state_files.app_paths(app_id).events)

    def wait_terminal(self, app_id: str, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the app to end; return whether it has ended or does not exist."""
        deadline = time.monotonic() + timeout
        paths = state_files.app_paths(app_id)
        looks = 0
        while True:
            now = _look(paths) if looks % _READS_PER_PROCESS_CHECK == 0 else state.recorded(paths)
            if now is None and looks % _READS_PER_PROCESS_CHECK:
                now = _look(paths)  # an app whose folder was removed may still run
            if now is None or now.terminal:
                return True
            if time.monotonic() >= deadline:
                return False
            looks += 1
            time.sleep(_POLL)

    # --- cancellation and deletion

    def stop(self, app_id: str, grace: float | None) -> None:
        """Ask the app to end and return immediately; do nothing if the app has ended or does not exist.

        Args:
            app_id: id of the app.
            grace: seconds from SIGTERM to SIGKILL; 0 sends SIGKILL immediately; None for the app's own run option.

        Raises:
            RuntimeError: the app runs on another machine.
        """
        found = self._find(app_id)
        if found is None:
            return
        paths, record = found
        # A supervisor that runs is asked to end the app, whatever the files say.
        if not state.supervisors(paths):
            if record.terminal:
                return
            watching = state.load_owners(paths)
            if watching is not None and watching.life(watching.supervisor) is owners.ProcessStatus.ELSEWHERE:
                raise RuntimeError(f"app {app_id} runs on {watching.machine.hostname}; it can only be cancelled there")
        state.request_stop(paths, grace)

    def _cancel_existing(self, app_id: str) -> None:
        """End the app and wait for that, as ``LocalScheduler`` does; give up some seconds after its grace period.

        Raises:
            RuntimeError: the app runs on another machine.
        """
        found = self._find(app_id)
        if found is not None and not found[1].terminal:
            self._end(found[0])

    def _end(self, paths: state_files.AppPaths) -> bool:
        """Ask an app to end and wait for its grace period and some seconds; return whether it has ended."""
        rendered = _request(paths)
        self.stop(paths.app_id, None)
        grace = rendered.grace if rendered else float(DetachedOpts.grace)
        return self.wait_terminal(paths.app_id, grace + _END_EXTRA)

    def _delete_existing(self, app_id: str) -> None:
        """Remove an app's folder; if the app runs, end it first.

        Raises:
            RuntimeError: the app could not be ended.
        """
        found = self._find(app_id)
        if found is None:
            return
        paths, record = found
        if not record.terminal and not self._end(paths):
            raise RuntimeError(f"app {app_id} did not end after a stop request; its folder {paths.root} is kept")
        folder.remove_app(paths)


def _look(paths: state_files.AppPaths) -> AppRecord | None:
    """Return the current state of an app; None if it does not exist.

    Raises:
        StateAccessError: the app's folder is a link, belongs to another user, or may not be read.
    """
    try:
        paths.check_owner()
    except FileNotFoundError:
        return state.orphaned_record(paths)
    except NotADirectoryError:
        return None
    except OSError as error:
        raise StateAccessError.of(error, paths.root) from None
    return state.current_state(paths)


def _request(paths: state_files.AppPaths) -> DetachedRequest | None:
    """Read the request of an app; return None if it is missing or damaged."""
    with contextlib.suppress(state_files.DamagedFileError):
        return request.load(paths)
    return None


def _show(rendered: DetachedRequest) -> str:
    return pprint.pformat(asdict(rendered), indent=2, width=80, sort_dicts=False)


def create_scheduler(session_name: str, **kwargs: Any) -> DetachedScheduler:
    """Create the scheduler for TorchX; touch neither disk nor network. Parameters of other schedulers are ignored."""
    return DetachedScheduler(session_name)
