# SPDX-License-Identifier: BSD-3-Clause
"""Submit apps to Slurm.

It does not use TorchX's Slurm scheduler, which makes every replica a job component, fails on pending jobs with a
KeyError (on Slurm 22.05), looks for logs in the directory of submission only, and cuts environment values at commas.
None of these can be fixed from outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from torchx.specs import AppDef, Role
from torchx.workspace.dir_workspace import DirWorkspaceMixin

from torchx_monarch.backends.core import state_files, submitted_app
from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery, read_undamaged
from torchx_monarch.backends.core.errors import RemoveError, StateAccessError, SubmitError, UserError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.backends.slurm import (
    folder,
    job_state,
    native,
    prune,
    records,
    render,
    snapshot,
    states,
)
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.job_state import JobState
from torchx_monarch.backends.slurm.native import SlurmError
from torchx_monarch.backends.slurm.options import SlurmOpts, check_pyxis, check_slurm
from torchx_monarch.backends.slurm.records import CancelRecord
from torchx_monarch.backends.slurm.request import SlurmRequest
from torchx_monarch.backends.slurm.snapshot import SlurmSnapshot
from torchx_monarch.insight import events
from torchx_monarch.model.check_result import CheckResult
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import log_reader

_ASK_EVERY = 5.0
"""Seconds between two queries to Slurm while waiting for an app to end: all users share slurmctld."""

_ASK_AFTER_END = 0.5
"""Seconds between two queries to Slurm once the job's own record says that it has ended."""

_CANCEL_EXTRA = 2 * HOST_EXTRA
"""Seconds beyond the grace period after which a second cancel is a plain scancel, which ignores the batch step."""


class _DirWorkspace(DirWorkspaceMixin):  # type: ignore[misc]
    """Copies workspaces into ``job_dir``, and leaves roles the image of their container."""

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Cfg) -> None:
        image = role.image
        super().build_workspace_and_update_role(role, workspace, cfg)
        if cfg.get("container"):
            role.image = image


class SlurmBackend(Backend[SlurmOpts, SlurmRequest, SlurmSnapshot]):
    """Runs each role as a component of a Slurm job, and each replica as the task of one node.

    It needs Slurm's commands, and a folder that all nodes see, such as, usually, the home directory. Methods that query
    Slurm raise ``SlurmError`` if a command fails or cannot be run.
    """

    options = SlurmOpts
    capabilities = Capabilities(shares_interpreter=True)
    poll = 0.05
    config_section = "slurm"

    def __init__(self) -> None:
        self.workspace = _DirWorkspace()
        self._asked: dict[str, float] = {}

    # -- submitting ----------------------------------------------------------------------------------------------------

    def checks(self, options: SlurmOpts | None) -> Iterable[CheckResult]:
        """Check Slurm's commands, its controller, the partition and the folder of jobs."""
        return check_slurm(options)

    def check_options(self, options: SlurmOpts) -> None:
        """Check the run options that do not depend on the app."""
        render.check_options(options)

    def runs_images(self, options: SlurmOpts) -> bool:
        """Return whether replicas run in containers."""
        return options.container is not None

    def render(self, app: AppDef, submitted: SubmittedApp, options: SlurmOpts) -> SlurmRequest:
        """Return the request that runs an app."""
        return render.render(app, submitted, options)

    def submit(self, request: SlurmRequest, submitted: SubmittedApp, credentials: str) -> str:
        """Submit the job and return its id.

        Raises:
            StateDirError: the state directory cannot be written, or a part of it belongs to another user.
            SubmitError: the job's folder cannot be written. It is removed, as it is when sbatch fails.
        """
        if any(role.container for role in request.roles):
            check_pyxis()
        if os.path.exists(request.folder):  # the same dry run may be submitted twice
            request = request.renamed(folder.new(request.name, os.path.dirname(request.folder)))
        paths = JobFolder(request.folder)
        began = time.time()
        folder.prepare(paths)
        try:
            os.makedirs(os.path.dirname(paths.root), mode=0o700, exist_ok=True)
            os.mkdir(paths.root, 0o700)
            scripts = {paths.script: request.script}
            for index, role in enumerate(request.roles):
                if role.container is not None:
                    scripts[paths.task_script(index)] = role.container.task_script(paths, role.name)
            state_files.write_json(paths.app, {"created": began, **submitted.to_json()})
            state_files.write_json(paths.request, asdict(request.with_credentials(credentials)))
            for path, text in scripts.items():
                with open(path, "x") as file:
                    file.write(text)
        except OSError as error:
            shutil.rmtree(paths.root, ignore_errors=True)
            where = error.filename or paths.root
            raise SubmitError(
                f"cannot write the folder of the job, {where}: {error.strerror} (run option job_dir)"
            ) from None
        app_ids: list[str] = []
        begun, done, given_up = threading.Event(), threading.Event(), threading.Event()

        def submit() -> None:
            begun.set()
            try:
                if not given_up.is_set():
                    app_ids.append(native.submit(request.command(paths.script)))
            finally:
                done.set()

        try:
            # In a thread: sbatch may have submitted the job when Ctrl-C comes, and only its answer has the job's id.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(submit).result()
        except BaseException:
            given_up.set()
            if begun.is_set():  # the pool does not wait for a thread whose start Ctrl-C has interrupted
                done.wait()
            for app_id in app_ids:
                with contextlib.suppress(SlurmError):
                    native.checked(["scancel", app_id])
            shutil.rmtree(paths.root, ignore_errors=True)
            raise
        (app_id,) = app_ids
        folder.link_id(app_id, paths.root)
        events.append(paths.events, "submitted", f"submitted as job {app_id}", seconds=time.time() - began)
        with contextlib.suppress(OSError, StateAccessError):
            prune.prune()
        return app_id

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(self, app_id: str, *, brief: bool = False) -> SlurmSnapshot | None:
        """Read the state of an app; return None if no app of this scheduler has this id."""
        job = snapshot.state_of(app_id)
        return snapshot.of_app(app_id, job, brief=brief) if job else None

    def snapshots(self, options: Cfg) -> list[SlurmSnapshot]:
        """Read the states of the apps of this state directory and of this user's other apps that Slurm remembers."""
        live = {job.leader: [job] for job in native.listed_jobs()}
        folders = folder.job_folders()
        for app_id, jobs in live.items():
            job_folder = folder.folder_of_comment(jobs[0].comment)
            if job_folder is not None and not snapshot.is_deleted(app_id, job_folder, jobs):
                folders[app_id] = job_folder
        lost = [app_id for app_id in folders if app_id not in live and not job_state.has_recorded_end(folders[app_id])]
        recorded = native.recorded_jobs(lost)

        def read(app_id: str) -> SlurmSnapshot:
            components = live.get(app_id) or recorded.get(app_id, [])[:1]
            state = job_state.of_job(folders[app_id], components)
            app = submitted_app.load(folders[app_id].app, folders[app_id].trusted)
            name = app.app.name if app else components[0].name if components else ""
            return SlurmSnapshot(
                app_id=app_id,
                name=name,
                roles=[],
                app=app.app if app else None,
                created=folders[app_id].submitted,
                started=snapshot.first_start(state),
                native=state.outcome,
                job=state,
            )

        return read_undamaged(sorted(folders, key=int, reverse=True), read)

    def read_log(
        self, app: SlurmSnapshot, role: str, replica: int, query: LogQuery[SlurmSnapshot]
    ) -> Iterator[TimedLine]:
        """Yield lines of a replica's log; of both streams together if no stream is named. Times are right to 0.1 s."""
        job = app.job
        return log_reader.lines(
            job.folder.replica_logs(role, replica),
            query.stream.value if query.stream else "combined",
            since=query.since,
            until=query.until,
            tail=query.tail,
            ended=lambda: self.has_ended(app.app_id),
            follow=query.follow and not job.state.is_terminal,
            below=job.folder.trusted,
        )

    def native_request(self, app_id: str) -> tuple[SlurmRequest, SubmittedApp | None] | None:
        """Return the request as submitted; None if the app does not exist or its request.json cannot be read."""
        paths = folder.find(app_id)
        if paths is None:
            return None
        request = records.read(SlurmRequest, paths.request, paths.trusted)
        return (request, submitted_app.load(paths.app, paths.trusted)) if request else None

    def events_path(self, app_id: str) -> Path | None:
        """Return the path of the app's events file; None if this state directory does not know its folder."""
        paths = folder.find(app_id)
        return Path(paths.events) if paths else None

    def log_folder(self, app_id: str, role: str, replica: int) -> Path | None:
        """Return the folder of a replica's logs; None if this state directory does not know the app's folder."""
        paths = folder.find(app_id)
        return Path(paths.replica_logs(role, replica)) if paths else None

    def still_runs(self, app: SlurmSnapshot) -> bool:
        """Return whether Slurm reports that the app runs, whatever its files say."""
        return app.job.is_live

    def check_removable(self, app: SlurmSnapshot) -> None:
        """Check that the app is this user's.

        Raises:
            UserError: it is not.
        """
        _check_owner(app)

    def has_ended(self, app_id: str) -> bool:
        """Return whether an app has ended or does not exist; at most every 5 s, or 0.5 s once its record says so."""
        now = time.monotonic()
        paths = folder.find(app_id)
        is_recorded = paths is not None and job_state.has_recorded_end(paths)
        if now < self._asked.get(app_id, -_ASK_EVERY) + (_ASK_AFTER_END if is_recorded else _ASK_EVERY):
            return False
        self._asked[app_id] = now
        with contextlib.suppress(SlurmError, state_files.DamagedFileError):
            job = snapshot.state_of(app_id)
            return job is None or not job.is_live
        return False

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: SlurmSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Cancel an app and return immediately.

        Args:
            outcome: ignored: the batch step ends the rest of an app that has succeeded or failed.
            grace: seconds from SIGTERM to SIGKILL: 0 to kill immediately; None, and any other value, for the app's run
                option, since the batch step knows no other.

        Raises:
            UserError: the job belongs to another user.
        """
        _check_owner(app)
        self._asked.pop(app.app_id, None)
        cancel(app.app_id, app.job)
        if grace == 0:
            native.run(["scancel", "--signal=KILL", app.app_id])

    def remove(self, app: SlurmSnapshot) -> None:
        """Remove the job's folder.

        Raises:
            RemoveError: it is not the folder of a job of this user, or cannot be removed.
        """
        try:
            folder.delete(app.app_id, app.job.folder)
        except OSError as error:
            raise RemoveError(app.app_id, app.job.folder.root, error) from None


def _check_owner(app: SlurmSnapshot) -> None:
    """Check that an app is this user's: the comment of another user's job may name any folder.

    Raises:
        UserError: it is not.
    """
    if owner := app.job.other_user:
        raise UserError(
            f"job {app.app_id} belongs to another user, {owner}: only that user can cancel or delete it by torchx"
        )


def cancel(app_id: str, job: JobState) -> None:
    """Request the cancellation of an app for which ``JobState.is_live`` is true, and return immediately.

    If job.json says that the job has ended, it does not use a plain scancel, which would change the job's state.

    Raises:
        SlurmError: a command of Slurm's fails or cannot be run.
    """
    before = records.read(CancelRecord, job.folder.cancel, job.folder.trusted)
    with contextlib.suppress(OSError):  # the folder is on another machine: scancel works without it
        if before is None:
            state_files.write_json(job.folder.cancel, {"time": time.time()}, below=job.folder.trusted)
    grace = records.read_submission(job.folder).grace
    overdue = before is not None and time.time() > before.time + grace + _CANCEL_EXTRA
    if overdue or not _batch_runs(job) or not (native.signal_batch_step(app_id) or job.state.is_terminal):
        native.checked(["scancel", app_id])


def _batch_runs(job: JobState) -> bool:
    """Whether a batch step runs that can receive a signal: it has begun, and Slurm has not ended it."""
    if not job.components or states.to_state(job.components[0].state) is not State.RUNNING:
        return False
    return job.record is not None and not job.record.outside
