# SPDX-License-Identifier: BSD-3-Clause
"""The base of a backend for a batch system, which adds how to submit, to read the queue, and to cancel.

Each role is an array job, or each replica a job. What a job runs is ``task``; all else is in the app's ``folder``.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from torchx.specs import AppDef, Role

from torchx_monarch.backends import entrypoint
from torchx_monarch.backends.batch.folder import BatchRequest, JobFolder
from torchx_monarch.backends.batch.job_list import JobList
from torchx_monarch.backends.batch.options import SubmitOpts
from torchx_monarch.backends.batch.snapshot import BatchSnapshot, QueuedJob, has_ended, read_app
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, CheckResult, LogQuery, read_undamaged
from torchx_monarch.backends.core.errors import (
    BackendError,
    RemoveError,
    StateAccessError,
    StateDirError,
    SubmitError,
    SubmittedAlreadyError,
    UserError,
)
from torchx_monarch.backends.core.options import safe_name
from torchx_monarch.backends.core.snapshot import Outcome, TimedLines
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.folder import remove_app
from torchx_monarch.backends.local.supervision import RoleRequest
from torchx_monarch.insight import events
from torchx_monarch.model.env_names import JOB_VARIABLES
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import log_reader
from torchx_monarch.system import safe_files
from torchx_monarch.system.run_dirs import remove_tree
from torchx_monarch.system.untrusted_text import one_line

_NOT_SUBMITTED = QueuedJob(
    State.PENDING, "it is not submitted yet; if its submission was interrupted, `torchx cancel` ends the job"
)

_TIMEOUT = 60.0
"""Seconds that a command may take: a batch system may answer late under load."""


class Job(NamedTuple):
    """What the batch system is to run: all replicas of a role as an array, or one of them.

    Attributes:
        name: a unique name of letters, digits and ``-_.``, which begins with a letter.
        words: the command.
        tasks: number of replicas.
        cpu: number of CPUs that each needs; 0 if it does not say.
        gpu: number of GPUs that each needs.
        memory: megabytes of memory that each needs; 0 if it does not say.
        output: the file for what the batch system itself has to say.
        submit_args: further words for the command that submits.
    """

    name: str
    words: Sequence[str]
    tasks: int
    cpu: int
    gpu: int
    memory: int
    output: str
    submit_args: Sequence[str]


_log = logging.getLogger("torchx_monarch")

_job_lists: dict[str, JobList] = {}

O = TypeVar("O", bound=SubmitOpts)  # noqa: E741


class BatchBackend(Backend[O, BatchRequest, BatchSnapshot]):
    """A batch system.

    Attributes:
        name: name of its folder below the state directory.
        cancel_command: the command that ends the jobs whose ids follow it: array jobs (``ID``), tasks of them
            (``ID.NUMBER``), other jobs.
        array: the variable in which a task of an array job finds its number; empty if each replica is a job.
        first_task: the number of the first task.
        job_id: a regular expression for what the submission prints, whose first group is the job's id.
        unknown_job: a regular expression for what the cancellation prints of a job that has ended.
        install: what to install if its commands are missing.
    """

    capabilities = Capabilities(supervises=True, shares_interpreter=True, limits_resources=True, needs_owner=True)
    poll = 0.5
    name: ClassVar[str]
    cancel_command: ClassVar[Sequence[str]]
    array: ClassVar[str] = ""
    first_task: ClassVar[int] = 0
    job_id: ClassVar[str] = r"(\d+)"
    unknown_job: ClassVar[str] = r"(?i)not exist|unknown|invalid job|not found|finished"
    install: ClassVar[str] = ""

    # -- what a batch system adds --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def submit_command(self, job: Job, options: O) -> Sequence[str]:
        """Return the command that submits a job and prints its id."""

    @abc.abstractmethod
    def queued(self) -> Mapping[str, QueuedJob]:
        """Return the user's jobs that have not ended, by id. A task of an array job is ``ID.NUMBER``."""

    def _read_queue(self) -> Mapping[str, QueuedJob]:
        """Return ``queued``; raise BackendError for an answer that cannot be read, such as a warning before it."""
        try:
            return self.queued()
        except (LookupError, SyntaxError, ValueError) as error:  # SyntaxError: of XML
            raise BackendError(f"{self.name} has answered what is no list of jobs: {error!r}") from None

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, command: Sequence[str]) -> str:
        """Run a command of the batch system and return what it prints.

        Raises:
            BackendError: it is missing, fails, or does not end in time.
        """
        try:
            done = subprocess.run(
                command,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT,
                check=False,
                start_new_session=True,  # Ctrl-C is for this process, which needs the answer (``submit``)
            )
        except FileNotFoundError:
            raise BackendError(f"{command[0]!r} is not on the PATH: install {self.install}") from None
        except OSError as error:
            raise BackendError(f"{command[0]!r} cannot be run: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise BackendError(f"`{' '.join(command[:2])}` has not answered for {_TIMEOUT:g} s") from None
        if done.returncode:
            answer = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise BackendError(f"{command[0]} refuses: {answer}")
        return done.stdout

    def environ(self) -> dict[str, str]:
        """Return the environment of commands, which jobs may inherit: without the variables of a job around this."""
        return {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs, of which some may have ended."""
        if jobs:
            try:
                self.run([*self.cancel_command, *jobs])
            except BackendError as error:
                if not re.search(self.unknown_job, str(error)):
                    raise

    def checks(self, options: O) -> Iterable[CheckResult]:
        jobs = [job for job in self._read_queue().values() if not job.state.is_terminal]
        return [CheckResult(self.name, f"{len(jobs)} of your jobs wait or run")]

    # -- submitting ----------------------------------------------------------------------------------------------------

    def check_options(self, options: O) -> None:
        try:
            shlex.split(options.submit_args)
        except ValueError as error:
            raise UserError(f"Run option `submit_args` is {options.submit_args}: {error}") from None

    @property
    def root(self) -> str:
        return os.path.join(state_files.state_dir(), self.name, "jobs")

    def new_folder(self, name: str, parent: str) -> str:
        """Return a path for the folder of a new app."""
        return os.path.join(parent, f"{safe_name(name)[:60]}-{os.urandom(5).hex()}")

    def render(self, app: AppDef, submitted: SubmittedApp, options: O) -> BatchRequest:
        folder = JobFolder(self.new_folder(app.name, self.root))
        roles = [
            RoleRequest.from_role(role, spec, role.image) for role, spec in zip(app.roles, submitted.roles, strict=True)
        ]
        commands = [list(self.submit_command(job, options)) for job in self._jobs(folder, app.roles, options)]
        return BatchRequest(app.name, folder.root, roles, commands, float(options.grace))

    def _jobs(self, folder: JobFolder, roles: Sequence[Role], options: O) -> Iterator[Job]:
        submit_args = shlex.split(options.submit_args)
        names = iter(self.job_names(folder, [role.num_replicas for role in roles]))
        for index, role in enumerate(roles):
            words = [sys.executable, "-I", "-S", entrypoint.__file__, "batch.task", folder.root, str(index)]
            amounts = (role.resource.cpu, role.resource.gpu, role.resource.memMB)
            cpu, gpu, memory = (max(0, int(amount)) for amount in amounts)
            numbers = [f"{self.array}-{self.first_task}"] if self.array else range(role.num_replicas)
            tasks = role.num_replicas if self.array else 1
            for number in numbers:
                words_of_job = [*words, str(number)]
                yield Job(next(names), words_of_job, tasks, cpu, gpu, memory, folder.job_log, submit_args)

    def job_names(self, folder: JobFolder, replicas: Sequence[int]) -> list[str]:
        """Return the names of an app's jobs in the order of their submission; ``replicas``: the number of each role."""
        roles = [f"m-{folder.app_id}-{index}" for index in range(len(replicas))]
        if self.array:
            return roles
        return [f"{role}-{k}" for role, count in zip(roles, replicas, strict=True) for k in range(count)]

    def show(self, request: BatchRequest) -> str:
        """Return the commands that submit, and for each role its environment and command."""
        lines = [shlex.join(command) for command in request.commands]
        for role in request.roles:
            lines += ["", f"# role {role.spec.name}: {role.spec.replicas} x, in {role.cwd}"]
            lines += [f"export {name}={shlex.quote(value)}" for name, value in role.env.items()]
            lines.append(shlex.join(role.command))
        return "\n".join(lines)

    def submit(self, request: BatchRequest, submitted: SubmittedApp, credentials: str) -> str:
        if os.path.exists(request.folder):
            raise SubmittedAlreadyError(os.path.basename(request.folder))
        folder, created = JobFolder(request.folder), time.time()
        content = {"created": created, "jobs": [], "grace": request.grace, **submitted.to_json()}
        jobs: list[str] = content["jobs"]
        link = os.path.join(self._index, folder.app_id)
        try:
            state_files.make_folder(self.name, os.path.basename(self._index))
            if os.path.dirname(folder.root) == self.root:
                state_files.make_folder(self.name, os.path.basename(self.root))
        except OSError as error:
            raise StateDirError(error, self._index) from error
        try:
            os.makedirs(os.path.dirname(folder.root), mode=0o700, exist_ok=True)
            os.mkdir(folder.root, 0o700)
            self.fill_folder(folder, request.with_credentials(credentials))
            state_files.write_json(folder.app, content)
            os.symlink(folder.root, link)  # from here on the app is known, also if this process is killed
            with ThreadPoolExecutor(1) as pool:  # which lets Ctrl-C wait until the batch system has answered
                pool.submit(int).result()  # the end waits for a thread only once it runs
                for command in request.commands:
                    pool.submit(self._submit, command, jobs).result()
                    state_files.write_json(folder.app, content)
            app_id = self.app_id(folder, jobs)
            if app_id != folder.app_id:
                os.rename(link, os.path.join(self._index, app_id))
        except BaseException as error:
            try:
                self.cancel(jobs)
            except BackendError as reason:
                by_hand = " ".join([*self.cancel_command, *jobs])
                _log.warning("not cancelled, to be done by `%s`: %s", by_hand, reason)
            remove_tree(folder.root)
            state_files.remove_file(link)
            if isinstance(error, OSError):
                where = error.filename or folder.root
                raise SubmitError(f"cannot write the folder of the job, {where}: {error.strerror}") from None
            raise
        events.append(folder.events, "submitted", f"submitted as {app_id}", seconds=time.time() - created)
        with contextlib.suppress(OSError, BackendError):
            self.prune()
        return app_id

    def fill_folder(self, folder: JobFolder, request: BatchRequest) -> None:
        state_files.write_json(folder.request, asdict(request))
        folder.clear(request.roles)

    def _submit(self, command: Sequence[str], jobs: list[str]) -> None:
        answer = self.run(command)
        found = re.search(self.job_id, answer)
        if found is None:
            raise BackendError(f"`{command[0]}` has printed no job id: {answer.strip()}")
        jobs.append(found[1])

    def app_id(self, folder: JobFolder, jobs: Sequence[str]) -> str:
        """Return the id of an app that was submitted; ``jobs`` are those of its jobs."""
        return folder.app_id

    def prune(self) -> None:
        """Remove the folders of apps that ended long ago."""
        oldest = time.time() - state_files.keep_days() * 86400
        folders = {app_id: f for app_id, f in self.folders().items() if os.path.dirname(f.root) == self.root}
        old = {}
        for app_id, folder in folders.items():
            with contextlib.suppress(OSError):  # another process has removed it
                if os.path.getmtime(folder.root) < oldest:
                    old[app_id] = folder
        queued = self.list_jobs(old) if old else {}
        for app_id, folder in old.items():
            with contextlib.suppress(state_files.DamagedFileError, RemoveError):
                app = self.read(app_id, folder, queued, folder.load_jobs(), brief=True)
                if app is not None and not self._left(app, queued):
                    self.remove(app)

    # -- reading -------------------------------------------------------------------------------------------------------

    def folder(self, app_id: str) -> JobFolder | None:
        return self.folders([app_id]).get(app_id)

    def folders(self, app_ids: Collection[str] = ()) -> dict[str, JobFolder]:
        """Return the folders of all apps, or of some, by id.

        Raises:
            StateAccessError: another user owns the state directory, or it cannot be read.
        """
        try:
            if app_ids:  # looked up by name: NFS may list a folder as it was half a minute ago
                os.close(safe_files.open_folder(self._index, below=state_files.state_dir()))
            names = app_ids or state_files.names_in(self._index)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise StateAccessError(error, self._index) from None
        found = {}
        for name in filter(state_files.is_app_id, names):
            with contextlib.suppress(OSError):  # removed just now, or no link
                folder = JobFolder(os.readlink(os.path.join(self._index, name)))
                if os.path.exists(folder.app):
                    found[name] = folder
        return found

    @property
    def _job_list(self) -> JobList:
        """The jobs as the batch system has listed them last, for all Runners of a process."""
        return _job_lists.setdefault(self._index, JobList(self.list_jobs))

    @property
    def _index(self) -> str:
        """The folder of links to the folders of apps, by the ids of these."""
        return os.path.join(state_files.state_dir(), self.name, state_files.BATCH_IDS)

    def snapshot(self, app_id: str, *, brief: bool = False) -> BatchSnapshot | None:
        folder = self.folder(app_id)
        if folder is None:
            return None
        jobs = folder.load_jobs()
        if self.has_recorded_end(folder):
            self._job_list.forget(app_id)
            return self.read(app_id, folder, {}, jobs, brief=brief)
        return self._job_list.read(app_id, folder, lambda queued: self.read(app_id, folder, queued, jobs, brief=brief))

    def snapshots(self, options: Cfg) -> Sequence[BatchSnapshot]:
        folders = self.folders()
        jobs = {app_id: folder.load_jobs() for app_id, folder in folders.items()}
        queued = self.list_jobs(folders)
        return read_undamaged(jobs, lambda app_id: self.read(app_id, folders[app_id], queued, jobs[app_id], brief=True))

    def list_jobs(self, folders: Mapping[str, JobFolder]) -> Mapping[str, QueuedJob]:
        """Return the jobs of apps that the batch system knows; those that have ended, too, if it remembers them."""
        return self._read_queue()

    def has_recorded_end(self, folder: JobFolder) -> bool:
        """Return whether the files of an app say that it has ended, so that the queue need not be read."""
        stored = SubmittedApp.load(folder.app, folder.trusted)
        specs = stored.roles if stored else ()
        ending = folder.load_ending()
        return all(has_ended(folder, spec.name, k, ending) for spec in specs for k in range(spec.replicas))

    def read(
        self, app_id: str, folder: JobFolder, queued: Mapping[str, QueuedJob], jobs: Sequence[str], *, brief: bool
    ) -> BatchSnapshot | None:
        """Return the snapshot of an app by its files.

        Args:
            queued: the list of jobs, which is older than the records: tasks write these before they end.
            jobs: the ids of its jobs, which were read before that list: those that are submitted meanwhile lack there.
        """
        content = state_files.load(dict[str, Any], folder.app, folder.trusted)
        if content is None:
            return None
        stored = SubmittedApp.from_json(content, one_line(folder.app))
        submitted, jobs = jobs, self._job_ids(folder, stored.roles, jobs, queued)
        ending = folder.load_ending()
        unknown = _NOT_SUBMITTED if ending is None else None
        known = [
            [_job(queued, task_id) if task_id else unknown for task_id in ids]
            for ids in self.task_ids(stored.roles, jobs)
        ]
        app = read_app(
            app_id,
            stored.app.name,
            folder,
            stored.roles,
            known,
            ending,
            app=stored.app,
            created=content["created"],
            events=[] if brief else events.read_detailed(folder.events, below=folder.trusted),
            last_sign_of_life=events.last_sign_of_life(folder.events),
            grace=float(content.get("grace", 30.0)),
            ui_url=f"file://{folder.root}",
            jobs=jobs,
        )
        return replace(app, files=(submitted, app.files))

    def _job_ids(
        self, folder: JobFolder, roles: Sequence[RoleSpec], stored: Sequence[str], queued: Mapping[str, QueuedJob]
    ) -> Sequence[str]:
        """Return the ids of an app's jobs that were submitted: those stored, and one that is not stored (yet)."""
        names = self.job_names(folder, [spec.replicas for spec in roles])
        found = self.find_job(names[len(stored)], queued) if len(stored) < len(names) else ""
        return [*stored, found] if found else stored

    def find_job(self, name: str, queued: Mapping[str, QueuedJob]) -> str:
        """Return the id of the job that has this name; empty if the batch system knows none."""
        return next((job_id.partition(".")[0] for job_id, job in queued.items() if job.name == name), "")

    def task_ids(self, roles: Sequence[RoleSpec], jobs: Sequence[str]) -> list[list[str]]:
        """Return the batch system's ids of the replicas of each role, by those of the app's jobs.

        They are empty for replicas that were not submitted.
        """
        left = itertools.chain(jobs, itertools.repeat(""))
        if not self.array:
            return [list(itertools.islice(left, spec.replicas)) for spec in roles]
        tasks = [range(self.first_task, self.first_task + spec.replicas) for spec in roles]
        return [[f"{job}.{k}" if job else "" for k in numbers] for numbers, job in zip(tasks, left, strict=False)]

    def has_ended(self, app_id: str) -> bool | None:
        """Return None when the app's state is to be read, else False: the batch system is not asked all the time."""
        folder = self.folder(app_id)
        if folder is None or self.has_recorded_end(folder) or self._job_list.has_news(app_id, folder):
            return None
        return False

    def read_log(
        self, app: BatchSnapshot, role: str, replica: int, query: LogQuery[BatchSnapshot]
    ) -> Iterator[TimedLines]:
        """Return lines of a replica's log; of both streams together if no stream is named. Times are right to 0.1 s."""
        return log_reader.lines(app.folder.replica_logs(role, replica), query, app.folder.trusted)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: BatchSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Ask the tasks to stop, which look for that every second; end jobs that wait, and all jobs without grace."""
        try:
            app.folder.write_stop(outcome, grace)
        except OSError:  # a full disk: the tasks cannot be asked, so that the batch system must end them
            grace = 0
        left = self._left(app, self._read_queue())
        self.cancel([job_id for job_id, job in left.items() if grace == 0 or job.state is State.PENDING])

    def _left(self, app: BatchSnapshot, queued: Mapping[str, QueuedJob]) -> dict[str, QueuedJob]:
        """Return the tasks of an app that wait or run, by their ids."""
        ids = itertools.chain(*self.task_ids([role.spec for role in app.roles], app.jobs))
        jobs = {task_id: _job(queued, task_id) for task_id in ids}
        return {task_id: job for task_id, job in jobs.items() if job is not None and not job.state.is_terminal}

    def still_runs(self, app: BatchSnapshot) -> bool:
        """Return whether a job is in the queue that can never start."""
        return any(replica.is_stuck for replica in app.replicas)

    def remove(self, app: BatchSnapshot) -> None:
        if self.still_runs(app) or any(replica.is_alive for replica in app.replicas):
            self.cancel(app.jobs)
        try:
            remove_app(app.folder)
        except OSError as error:
            raise RemoveError(app.app_id, app.folder.root, error) from None
        state_files.remove_file(os.path.join(self._index, app.app_id))


def _job(queued: Mapping[str, QueuedJob], job_id: str) -> QueuedJob | None:
    """Return a job, or the task of an array job, or the job of which the batch system does not tell tasks apart."""
    return queued.get(job_id) or queued.get(job_id.partition(".")[0])
