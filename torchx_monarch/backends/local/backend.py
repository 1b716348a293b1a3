# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on this machine, under a supervisor that outlives the submitter, and answer queries from their folders."""

from __future__ import annotations

import logging
import os
import pprint
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchx.schedulers.ids import make_unique
from torchx.specs import AppDef

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery, read_undamaged
from torchx_monarch.backends.core.errors import BackendError, RemoveError, StateAccessError, UserError
from torchx_monarch.backends.core.options import MonarchOpts, QueueOpts, check_queue, safe_name
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, RoleSnapshot, TimedLines
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local import folder, gpus, machine_queue, submit
from torchx_monarch.backends.local.supervision import RoleRequest, SupervisorRecord, SupervisorRequest
from torchx_monarch.insight import events
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import log_reader
from torchx_monarch.system import processes

_MAX_WAIT = 1.0
"""Seconds of one wait for the end of a supervisor: a command of ``on_end`` may run when the app has ended already."""

_log = logging.getLogger("torchx_monarch")


@dataclass
class LocalOpts(QueueOpts, MonarchOpts):
    on: str = ""
    """A live allocation whose hosts run the job, after the runs before it, in the place of new hosts of this machine: a
    handle of any scheduler, an id or name, or `last`. Options of hosts are then the allocation's, and refused."""


class LocalBackend(Backend[LocalOpts, SupervisorRequest, AppSnapshot]):
    """Runs each replica as a process on this machine.

    The replicas run in the current folder, or in ``role.image`` if that is a folder. Requested CPUs and memory are not
    enforced.
    """

    options = LocalOpts
    capabilities = Capabilities(supervises=True, waits_for_cancel=True, shares_interpreter=True)
    poll = 0.02

    # -- submitting ----------------------------------------------------------------------------------------------------

    def check_options(self, options: LocalOpts) -> None:
        check_queue(options)

    def render(self, app: AppDef, submitted: SubmittedApp, options: LocalOpts) -> SupervisorRequest:
        counts = [role.resource.gpu for role in app.roles for _ in range(role.num_replicas) if role.resource.gpu > 0]
        if counts and not options.gpus:
            machine, has = f"this machine ({os.uname().nodename})", len(gpus.devices(os.environ))
            if has < max(counts):
                _log.warning(
                    "a replica of this app asks for --gpu %d, and %s has %s", max(counts), machine, has or "none"
                )
            elif len(counts) > 1:
                shared = f"{len(counts)} replicas of this app ask for GPUs, and each will see all {has} of {machine}"
                _log.warning("%s; -cfg gpus=%d divides so many between them", shared, sum(counts))
        replicas = sum(spec.replicas for spec in submitted.roles if not spec.sidecar)
        if options.gpus % max(1, replicas):
            raise UserError(f"Run option `gpus` is {options.gpus}, which {replicas} replicas cannot share equally")
        return SupervisorRequest(
            app_id=make_unique(safe_name(app.name)),
            name=app.name,
            roles=[RoleRequest.from_role(role, spec) for role, spec in zip(app.roles, submitted.roles, strict=True)],
            grace=float(options.grace),
            gpus=options.gpus,
            slots=options.slots,
        )

    def show(self, request: SupervisorRequest) -> str:
        return pprint.pformat(asdict(request), indent=2, width=80, sort_dicts=False)

    def submit(self, request: SupervisorRequest, submitted: SubmittedApp, credentials: str) -> str:
        if reason := machine_queue.check(request.gpus, request.slots, os.environ):
            raise UserError(reason)
        return submit.submit(request, submitted.to_json())

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(self, app_id: str, *, brief: bool = False) -> AppSnapshot | None:
        if not state_files.is_app_id(app_id):
            return None
        paths = state_files.app_paths(app_id)
        try:
            record = _read_record(paths)
            submitted = SubmittedApp.load(paths.app, paths.trusted)
        except state_files.DamagedFileError as error:
            if not brief:
                raise
            # Enough to cancel or delete the app.
            state_by_lock = State.RUNNING if folder.is_supervised(paths) else State.FAILED
            return AppSnapshot(app_id, app_id, (), native=Outcome(state_by_lock, str(error)))
        if record is None:
            return None
        happened = [] if brief else events.read_detailed(paths.events, below=paths.trusted)
        sign = events.last_sign_of_life(paths.events)
        app = _snapshot(app_id, record, submitted)
        return replace(app, events=happened, last_sign_of_life=sign, ui_url=Path(paths.root).as_uri())

    def snapshots(self, options: Cfg) -> list[AppSnapshot]:
        try:
            app_ids = state_files.app_ids()
        except OSError as error:
            raise StateAccessError(error, state_files.apps_dir()) from None

        def read(app_id: str) -> AppSnapshot | None:
            paths = state_files.app_paths(app_id)
            record = _read_record(paths)
            return _snapshot(app_id, record, SubmittedApp.load(paths.app, paths.trusted)) if record else None

        return read_undamaged(app_ids, read)

    def read_log(self, app: AppSnapshot, role: str, replica: int, query: LogQuery[AppSnapshot]) -> Iterator[TimedLines]:
        paths = state_files.app_paths(app.app_id)
        return log_reader.lines(paths.replica_logs(role, replica), query, paths.trusted)

    def folder(self, app_id: str) -> state_files.AppPaths | None:
        return state_files.app_paths(app_id) if state_files.is_app_id(app_id) else None

    def still_runs(self, app: AppSnapshot) -> bool:
        paths = state_files.app_paths(app.app_id)
        return folder.is_supervised(paths) or bool(folder.left(paths))

    def await_change(self, app_id: str, seconds: float) -> None:
        """Wait for the end of the app's supervisor: reading its files 50 times a second takes 3 % of a processor."""
        owner = folder.load_owner(state_files.app_paths(app_id))
        if owner is None or not owner.is_here or not processes.await_exit(owner.supervisor, min(seconds, _MAX_WAIT)):
            super().await_change(app_id, seconds)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: AppSnapshot, outcome: Outcome, grace: float | None) -> None:
        paths = state_files.app_paths(app.app_id)
        owner = folder.load_owner(paths)
        if owner is not None and not owner.is_here and not folder.is_supervised(paths):
            raise BackendError(
                f"app {app.app_id} runs on {owner.hostname}, which cannot be seen from here: cancel it there. If that "
                f"machine is gone for good, remove {paths.root}"
            )
        try:
            folder.request_stop(paths, outcome, grace)
        except OSError as error:
            raise BackendError(f"app {app.app_id} cannot be cancelled: {error}") from None

    def remove(self, app: AppSnapshot) -> None:
        paths = state_files.app_paths(app.app_id)
        try:
            folder.remove_ended(paths)
        except OSError as error:
            raise RemoveError(app.app_id, paths.root, error) from None


def _read_record(paths: state_files.AppPaths) -> SupervisorRecord | None:
    """Return the current state of an app; None if it does not exist; raise StateAccessError if it may not be read."""
    try:
        paths.check_owner()
        return folder.current_state(paths)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StateAccessError(error, paths.root) from None


def _snapshot(app_id: str, record: SupervisorRecord, submitted: SubmittedApp | None) -> AppSnapshot:
    """Convert the record of an app, whose state its supervisor has decided."""
    specs = {spec.name: spec for spec in submitted.roles} if submitted else {}
    return AppSnapshot(
        app_id=app_id,
        name=record.name,
        roles=[
            RoleSnapshot(
                specs.get(role.name) or RoleSpec(role.name, len(role.replicas)),
                [
                    replica.snapshot(role.name, hostname=record.hostname, error=replica.error or "")
                    for replica in role.replicas
                ],
            )
            for role in record.roles
        ],
        app=submitted.app if submitted else None,
        created=record.created,
        started=record.started or 0.0,
        grace=record.grace,
        native=Outcome(record.state, record.msg, record.error or "", record.ended or 0.0),
        restarts=record.restarts,
    )
