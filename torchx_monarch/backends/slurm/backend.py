# SPDX-License-Identifier: BSD-3-Clause
"""Submit apps to Slurm.

It does not use TorchX's Slurm scheduler, which makes every replica a job component, fails on pending jobs with a
KeyError (on Slurm 22.05), looks for logs in the directory of submission only, and cuts environment values at commas.
None of these can be fixed from outside. Slurm's commands are asked for named fields, which are the same in all
versions; ``--json`` output differs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchx.specs import AppDef, InvalidRunConfigException, Role
from torchx.workspace.dir_workspace import DirWorkspaceMixin

from torchx_monarch.backends.batch.backend import BatchBackend, Job
from torchx_monarch.backends.batch.folder import BatchRequest, JobFolder
from torchx_monarch.backends.batch.snapshot import BatchSnapshot, QueuedJob
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.supervision import SupervisorRecord
from torchx_monarch.backends.slurm import render
from torchx_monarch.backends.slurm.batch_step import SlurmRequest
from torchx_monarch.backends.slurm.render import SlurmOpts
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State

_ALLOWED = {
    "container": ("pyxis", "pyxis"),
    # Without B:, Slurm signals all processes of a step, including Monarch's, which the signal would kill.
    "signal": (r"(R?B:|B:?R?:)TERM(@\d+)?", "B:TERM@SECONDS, such as B:TERM@120"),
}
"""A regular expression for the values of some run options, and what messages say."""

_STATES = {
    State.PENDING: "CONFIGURING PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT SUSPENDED",
    State.RUNNING: "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED",
    State.SUCCEEDED: "COMPLETED",
    State.CANCELLED: "CANCELLED",
    State.FAILED: "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED RECONFIG_FAIL REVOKED "
    "TIMEOUT",
}
"""Slurm's states for each of an app's (squeue(1), section JOB STATE CODES)."""

_NEVER = ("BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS")
"""The reasons of a job that can never start as it is."""

_JOB_ID = re.compile(r"(\d+)(?:\+0+)?")
"""The id that squeue and sacct print for a job (``17``) or its first component (``15+0``), which runs the script; not
that of another component (``15+1``), nor that of tasks of an array (``3_7``), which is no job of ours."""

_INHERITED = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


class _DirWorkspace(DirWorkspaceMixin):  # type: ignore[misc]
    """Copies workspaces into ``job_dir``, and leaves roles the image of their container."""

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, object]) -> None:
        image = role.image
        super().build_workspace_and_update_role(role, workspace, cfg)
        if cfg.get("container"):
            role.image = image


class SlurmBackend(BatchBackend[SlurmOpts]):
    """Runs each role as a step of a Slurm job, and each replica as the task of one node.

    An app's id is that of its job.
    """

    options = SlurmOpts
    name, cancel_command = "slurm", ("scancel",)
    job_id = r"(\d+)(?:;\S+)?\s*$"  # with several clusters, --parsable prints ID;CLUSTER
    install = "Slurm's commands, as the login nodes of a cluster have them (Debian: slurm-client, Red Hat: slurm)"
    capabilities = replace(BatchBackend.capabilities, needs_owner=False)  # its batch step is the owner
    poll = 0.1

    def __init__(self) -> None:
        self.workspace = _DirWorkspace()

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, command: Sequence[str]) -> str:
        try:
            return super().run(command)
        except BackendError as error:
            if "Memory specification" not in str(error):
                raise
            raise BackendError(f"{error}. If Slurm does not know the memory of its nodes: -cfg nomem=True") from None

    def environ(self) -> dict[str, str]:
        """Leave out, within a job, its SLURM_* variables, which describe that job: sbatch would read them as options.

        SBATCH_ARRAY_INX would make the submitted job an array.
        """
        inside = ("SBATCH_ARRAY_INX", "SLURM_", "SLURMD_") if "SLURM_JOB_ID" in os.environ else ("SBATCH_ARRAY_INX",)
        found = super().environ()
        return {name: found[name] for name in found if name in _INHERITED or not name.startswith(inside)}

    def submit_command(self, job: Job, options: SlurmOpts) -> Sequence[str]:
        """Not called: one command submits all roles (``render``)."""
        raise NotImplementedError

    def queued(self) -> Mapping[str, QueuedJob]:
        """Return the user's jobs as slurmctld reports them, also for some minutes after their end."""
        which = ("--all", f"--user={os.getuid()}", "--states=all")
        return parse_jobs(self.run(["squeue", "--noheader", *which, "--format=%i|%T|%r|%Z"]))

    # -- submitting ----------------------------------------------------------------------------------------------------

    def check_options(self, options: SlurmOpts) -> None:
        super().check_options(options)
        for name, (pattern, allowed) in _ALLOWED.items():
            value = options[name]
            if value is not None and not re.fullmatch(pattern, value):
                reason = f"Run option `{name}` is {value!r}; allowed is {allowed}"
                raise InvalidRunConfigException(reason, name, dict(options))

    def runs_images(self, options: SlurmOpts) -> bool:
        return options.container is not None

    def render(self, app: AppDef, submitted: SubmittedApp, options: SlurmOpts) -> BatchRequest:
        parent = os.path.abspath(options.job_dir) if options.job_dir else self.root
        return render.render(app, submitted, options, self.new_folder(app.name, parent))

    def show(self, request: BatchRequest) -> str:
        """Return the sbatch command, the roles, the batch script and the commands of the roles' steps."""
        assert isinstance(request, SlurmRequest)
        steps = [shlex.join(request.step(index)) for index in range(len(request.roles))]
        return "\n".join([super().show(request), "", "# job.sh", request.script, *steps])

    def fill_folder(self, folder: JobFolder, request: BatchRequest) -> None:
        assert isinstance(request, SlurmRequest)
        super().fill_folder(folder, request)
        with open(os.path.join(folder.root, "job.sh"), "x") as file:
            file.write(request.script)

    def app_id(self, folder: JobFolder, jobs: Sequence[str]) -> str:
        """Return the job's id. Slurm uses an id again some day: the last job has it."""
        return jobs[0]

    def job_names(self, folder: JobFolder, replicas: Sequence[int]) -> list[str]:
        """Return the working folder of the one job: its name is for its user."""
        return [folder.root]

    def task_ids(self, roles: Sequence[RoleSpec], jobs: Sequence[str]) -> list[list[str]]:
        (job,) = jobs or [""]
        return [[job] * spec.replicas for spec in roles]

    # -- reading -------------------------------------------------------------------------------------------------------

    def list_jobs(self, folders: Mapping[str, JobFolder]) -> Mapping[str, QueuedJob]:
        """Add jobs that Slurm's controller has forgotten, from the accounting database."""
        queued = dict(self.queued())
        # An app has another id only if its submitter was killed: its job is young.
        ids = filter(str.isdigit, folders.keys() - queued.keys())
        if forgotten := [app_id for app_id in ids if not self.has_recorded_end(folders[app_id])]:
            words = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
            with contextlib.suppress(BackendError):  # there is no accounting
                queued |= parse_jobs(self.run([*words, f"--jobs={','.join(forgotten)}"]))
        return queued

    def has_recorded_end(self, folder: JobFolder) -> bool:
        """Return whether the batch step has recorded the end, and Slurm cannot know more."""
        record = folder.load_record()
        return record is not None and record.ended is not None and not record.outside

    def read(
        self, app_id: str, folder: JobFolder, queued: Mapping[str, QueuedJob], jobs: Sequence[str], *, brief: bool
    ) -> BatchSnapshot | None:
        """Return the snapshot of a job, whose outcome is Slurm's and the batch step's."""
        record, app = folder.load_record(), super().read(app_id, folder, queued, jobs, brief=brief)
        if app is None:
            return None
        job = queued.get(*app.jobs) if app.jobs else None
        started = record.started if record else None
        return replace(app, native=_outcome(job, record, folder), files=(app.files, record), started=started or 0.0)


def _outcome(job: QueuedJob | None, record: SupervisorRecord | None, folder: JobFolder) -> Outcome | None:
    """Return the state of a job as Slurm and the batch step tell it; None if they do not know it any more."""
    if record is not None and record.ended is not None and not (record.outside and job):
        return Outcome(record.state, record.msg, time=record.ended)
    if job is None:
        return None
    if not job.state.is_terminal:
        return Outcome(State.FAILED if job.is_stuck else job.state, job.reason)
    if job.state is State.SUCCEEDED:
        return Outcome(State.SUCCEEDED)
    ending = folder.load_ending()
    if ending is not None and ending.state is State.CANCELLED:
        return ending
    if job.reason:
        return Outcome(job.state, job.reason)
    if record is None:
        hint = f"it has written no record to {folder.root}: do all nodes see that folder (run option job_dir)?"
        return Outcome(State.FAILED, f"the job has ended; {hint}")
    return Outcome(record.state, record.msg, time=record.ended) if record.ended is not None else None


def parse_jobs(text: str) -> dict[str, QueuedJob]:
    """Parse lines of ``ID|STATE|REASON|FOLDER``, of which the last two may be missing."""
    jobs: dict[str, QueuedJob] = {}
    for line in text.splitlines():
        job_id, *fields = line.split("|", 3)
        found = _JOB_ID.fullmatch(job_id.strip())
        if found is not None and fields:
            jobs.setdefault(found[1], _job(*(field.strip() for field in fields)))
    return jobs


def _job(shown: str, reason: str = "", folder: str = "") -> QueuedJob:
    """Return a job by its state, which may be shown as ``CANCELLED by 1000`` or ``CANCELLED+``, and why it waits."""
    name = shown.partition(" ")[0].rstrip("+")
    state = next((state for state, names in _STATES.items() if name in names.split()), State.UNKNOWN)
    if state is State.PENDING and reason not in ("", "None", "(null)"):
        if reason in _NEVER:
            return QueuedJob(state, f"the job can never start: {reason}", True, folder)
        return QueuedJob(state, f"{name}: waits for {reason}", name=folder)
    is_said = name == "SUSPENDED" or (state in (State.CANCELLED, State.FAILED) and name != "FAILED")
    return QueuedJob(state, f"Slurm reports {shown}" if is_said else "", name=folder)
