# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler that submits to Slurm.

It does not extend TorchX's Slurm scheduler, which makes every replica a job component, fails on pending jobs with a
KeyError (on Slurm 22.05), looks for logs in the directory of submission only, and cuts environment values at commas.
None of these can be fixed from outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppState, CfgVal, Role, runopts
from torchx.workspace.dir_workspace import DirWorkspaceMixin

from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.local import appdef, logs, state_files
from torchx_monarch.backends.options import run_options
from torchx_monarch.backends.slurm import cancel, commands, folder, prune, records, render, snapshot
from torchx_monarch.backends.slurm.commands import SlurmError
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.options import SlurmOpts
from torchx_monarch.backends.slurm.records import EndRecord, Submission
from torchx_monarch.backends.slurm.request import SlurmRequest
from torchx_monarch.backends.validation import check_replica, matching
from torchx_monarch.insight import events
from torchx_monarch.model.env_names import replica0_variable

_ASK_EVERY = 5.0
"""Seconds between two queries to Slurm while waiting for an app to end: all users share slurmctld."""

_ASK_AFTER_END = 0.5
"""Seconds between two queries to Slurm once the job's own record says that it has ended."""

_POLL = 0.05

_END_EXTRA = 60.0
"""Seconds beyond the grace period that a cancelled job may take to end before its deletion fails."""


class SlurmScheduler(DirWorkspaceMixin, Scheduler[SlurmOpts]):  # type: ignore[misc]
    """Run each role as a component of a Slurm job, and each replica as the task of one node.

    It needs Slurm's commands, and a folder that all nodes see, such as, usually, the home directory.
    """

    def __init__(self, session_name: str) -> None:
        super().__init__("slurm", session_name)
        self._asked: dict[str, float] = {}

    def _run_opts(self) -> runopts:
        return run_options(SlurmOpts)

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, CfgVal]) -> None:
        """Accept roles without resources, which TorchX's check refuses; they get Slurm's defaults."""

    def replica0_host(self, app: AppDef, role: Role) -> str:
        """Return ``@VARIABLE``; the job sets the variable to the node of the role's replica 0."""
        return f"@{replica0_variable(app.roles.index(role))}"

    # -- submitting ----------------------------------------------------------------------------------------------------

    def _submit_dryrun(self, app: AppDef, cfg: SlurmOpts) -> AppDryRunInfo[SlurmRequest, SlurmOpts]:
        return AppDryRunInfo(render.render(app, cfg), str)

    def schedule(self, dryrun_info: AppDryRunInfo[SlurmRequest, SlurmOpts]) -> str:
        """Submit the job and return its id.

        Raises:
            ValueError: the dry run carries no AppDef.
            SlurmError: sbatch fails, or the job's folder cannot be written. The folder is removed.
        """
        if dryrun_info.app is None:
            raise ValueError("the dry run carries no AppDef; it must come from submit_dryrun()")
        request = dryrun_info.request
        if os.path.exists(request.folder):  # the same dry run may be submitted twice
            old = request.folder
            new = folder.new(request.name, os.path.dirname(old))
            options = {name: value and value.replace(old, new) for name, value in request.sbatch.items()}
            request = replace(request, folder=new, sbatch=options)
        paths = JobFolder(request.folder)
        began = time.time()
        try:
            os.makedirs(os.path.dirname(paths.root), mode=0o700, exist_ok=True)
            os.mkdir(paths.root, 0o700)
            if request.sbatch.get("array"):
                os.mkdir(paths.array)
            submitted = {"created": began, "cfg": dict(dryrun_info.cfg or {}), "app": appdef.to_json(dryrun_info.app)}
            state_files.write_json(paths.app, submitted)
            state_files.write_json(paths.request, request.to_json())
            with open(paths.script, "x") as file:
                file.write(request.script)
        except OSError as error:
            shutil.rmtree(paths.root, ignore_errors=True)
            where = error.filename or paths.root
            raise SlurmError(
                f"cannot write the folder of the job, {where}: {error.strerror} (run option job_dir)"
            ) from None
        try:
            app_id = commands.submit(request.command(paths.script))
        except SlurmError:
            shutil.rmtree(paths.root, ignore_errors=True)
            raise
        folder.link_id(app_id, paths.root)
        events.append(paths.events, "submitted", f"submitted as job {app_id}", seconds=time.time() - began)
        with contextlib.suppress(OSError):
            prune.prune()
        return app_id

    # -- looking -------------------------------------------------------------------------------------------------------

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the state of an app; None if no app of this scheduler has this id.

        Raises:
            SlurmError: a command of Slurm's fails or cannot be run.
        """
        app = snapshot.look(app_id)
        if app is None:
            return None
        definition = snapshot.submitted(app.folder)
        if definition is None:
            components = app.components[:1] if app.tasks else app.components
            roles = [Role(f"{one.name}-{at}" if at else one.name, image="") for at, one in enumerate(components)]
            definition = AppDef(components[0].name if components else app_id, roles)
        statuses, restarts, cause = snapshot.report(app, definition.roles)
        return DescribeAppResponse(
            app_id=app_id,
            state=app.state,
            num_restarts=restarts,
            msg=app.msg or NONE,
            structured_error_msg=cause,
            ui_url=f"file://{app.folder.root}",
            metadata=definition.metadata,
            roles_statuses=statuses,
            roles=definition.roles,
        )

    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """List the apps of this state directory and this user's other apps that Slurm remembers, newest first.

        Raises:
            SlurmError: a command of Slurm's fails or cannot be run.
        """
        live: dict[str, list[commands.Job]] = {}
        for job in commands.listed_jobs():
            live.setdefault(job.leader, []).append(job)
        known = folder.known()
        for app_id, jobs in live.items():
            noted = folder.noted(jobs[0].comment)
            if noted is not None and not folder.is_deleted(app_id, noted):
                known[app_id] = noted
        ended = {
            app_id: end
            for app_id, one in known.items()
            if app_id not in live and (end := records.read(EndRecord, one.end))
        }
        recorded = commands.recorded_jobs([app_id for app_id in known if app_id not in live and app_id not in ended])
        found = []
        for app_id in sorted(known, key=int, reverse=True):
            seen, accounts = live.get(app_id, []), recorded.get(app_id, [])
            if app_id in ended:
                state = AppState[ended[app_id].state]
            else:
                ask = partial(commands.recorded_job, app_id) if seen else partial(list, accounts)
                state = snapshot.known(known[app_id], seen, ask).state
            submitted = snapshot.submitted(known[app_id])
            said = seen or accounts
            name = submitted.name if submitted else said[0].name if said else ""
            found.append(ListAppResponse(app_id, state, name=name))
        return found

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
        """Return the lines of one replica's log; of both streams if ``streams`` is None. Times are exact to 0.1 s.

        Raises:
            ValueError: the app, role or replica does not exist, app.json is missing or damaged, or the regular
                expression is invalid.
            SlurmError: a command of Slurm's fails or cannot be run.
        """
        app = snapshot.look(app_id)
        if app is None:
            raise UserError(f"there is no app {app_id!r} of this scheduler")
        submitted = snapshot.submitted(app.folder)
        if submitted is None:
            raise UserError(f"app {app_id!r} has no logs that can be shown: {app.folder.app} is missing or damaged")
        sizes = {role.name: role.num_replicas for role in submitted.roles}
        check_replica(app_id, {name: size * max(len(app.tasks), 1) for name, size in sizes.items()}, role_name, k)
        run_id, run, replica = snapshot.locate_replica(app_id, app, k, sizes[role_name])
        found = logs.lines(
            run.folder.replica_logs(role_name, replica),
            (streams or Stream.COMBINED).value,
            since=since,
            until=until,
            ended=lambda: self._has_ended(run_id),
            follow=should_tail and not run.terminal,
        )
        return matching(found, regex)

    def events_path(self, app_id: str) -> Path:
        """Return the app's events file (``torchx_monarch.insight.events``); /dev/null if its folder is unknown."""
        known = snapshot.folder_of(app_id)
        return Path(known.events if known else os.devnull)

    def wait_terminal(self, app_id: str, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the app's end; return whether it has ended or does not exist."""
        deadline = time.monotonic() + timeout
        while not self._has_ended(app_id):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        return True

    def _has_ended(self, app_id: str) -> bool:
        """Whether an app has ended, for frequent calls: queries Slurm every 5 s, or 0.5 s once its record says so."""
        now = time.monotonic()
        known = snapshot.folder_of(app_id)
        said = known is not None and snapshot.has_recorded_end(known)
        if now < self._asked.get(app_id, -_ASK_EVERY) + (_ASK_AFTER_END if said else _ASK_EVERY):
            return False
        self._asked[app_id] = now
        with contextlib.suppress(SlurmError):
            app = snapshot.look(app_id)
            return app is None or app.terminal
        return False

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app_id: str, grace: float | None) -> None:
        """Cancel the app and return immediately.

        Args:
            app_id: the id of a job, an array or an array task.
            grace: seconds from SIGTERM to SIGKILL: 0 to kill immediately; None, and any other value, for the app's run
                option, since the batch step knows no other.

        Raises:
            UserError: the job belongs to another user.
            SlurmError: a command of Slurm's fails or cannot be run.
        """
        self._cancel_existing(app_id)
        if grace == 0:
            commands.run(["scancel", "--signal=KILL", app_id])

    def _cancel_existing(self, app_id: str) -> None:
        """Cancel an app and return immediately. Its replicas have the grace period of its run option.

        Raises:
            UserError: the job belongs to another user.
            SlurmError: a command of Slurm's fails or cannot be run.
        """
        app = snapshot.look_own(app_id)
        if app is not None and cancel.is_needed(app):
            cancel.cancel(app_id, app)

    def _delete_existing(self, app_id: str) -> None:
        """Cancel a job or an array if it runs, wait for its end and remove its folder.

        Raises:
            UserError: the job belongs to another user.
            SlurmError: the app is an array task, does not end in time, or a command of Slurm's fails.
        """
        app = snapshot.look_own(app_id)
        if app is None:
            return
        if app.folder.whole != app.folder:
            whole = app_id.partition("_")[0]
            raise SlurmError(
                f"{app_id} is one task of an array, which is deleted as a whole: {whole} (torchx cancel ends it alone)"
            )
        if cancel.is_needed(app):
            cancel.cancel(app_id, app)
            submission = records.read(Submission, app.folder.request)
            until = time.monotonic() + (submission.grace if submission else 0.0) + _END_EXTRA
            while (now := snapshot.look(app_id)) is not None and cancel.is_needed(now):
                if time.monotonic() > until:
                    raise SlurmError(
                        f"job {app_id} did not end after a stop request; its folder {app.folder.root} is kept"
                    )
                time.sleep(0.5)
        folder.delete(app_id, app.folder)


def create_scheduler(session_name: str, **kwargs: Any) -> SlurmScheduler:
    """Create the scheduler without running any command; ignore parameters for other schedulers."""
    return SlurmScheduler(session_name)
