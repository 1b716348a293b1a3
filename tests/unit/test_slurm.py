# SPDX-License-Identifier: BSD-3-Clause
"""monarch_slurm without a cluster: what is submitted, what Slurm's commands (of 22.05) say, what a job's state is."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torchx.runner import Runner
from torchx.specs import (
    AppDef,
    BindMount,
    DeviceMount,
    Resource,
    Role,
    VolumeMount,
)
from torchx.specs.finder import ComponentValidationException

from tests.contract.place import tree
from torchx_monarch.backends.batch.folder import JobFolder
from torchx_monarch.backends.batch.snapshot import QueuedJob
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.errors import BackendError, StateDirError, UserError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.supervision import RoleRecord, SupervisorRecord
from torchx_monarch.backends.slurm.backend import SlurmBackend, parse_jobs
from torchx_monarch.backends.slurm.batch_step import BatchStep, SlurmRequest, last_error
from torchx_monarch.components import ft
from torchx_monarch.model import codec
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_slurm
from torchx_monarch.supervisor.replica import ReplicaRecord
from torchx_monarch.transport import credentials


@pytest.fixture
def runner() -> Runner:
    return Runner("torchx", {"monarch_slurm": monarch_slurm})


def app(replicas: int = 2, **more: Any) -> AppDef:
    args = ["--nnodes", str(replicas), "--nproc-per-node", "2", "train.py"]
    resource = Resource(cpu=3, gpu=2, memMB=2048)
    trainer = Role(
        "trainer", image="", entrypoint="torchrun", args=args, num_replicas=replicas, resource=resource, **more
    )
    reader = Role("reader", image="", entrypoint="sh", args=["-c", "echo ${replica_id} $$x ${app_id}"], num_replicas=3)
    reader.metadata = {"monarch": {"wrap": False}}
    return AppDef("my app", [trainer, reader])


def dryrun(runner: Runner, app: AppDef, **cfg: Any) -> SlurmRequest:
    request: SlurmRequest = runner.dryrun(app, "monarch_slurm", cfg=cfg).request
    return request


def test_command_line_says_what_is_asked_for(runner: Runner) -> None:
    options = {
        "partition": "p",
        "account": "a",
        "qos": "q",
        "time": "1:00:00",
        "constraint": "c&d",
        "reservation": "r",
        "mail-user": "me@x",
        "mail-type": "END",
        "comment": "it's mine",
        "exclusive": True,
        "exclude_nodes": "n7+n[1-3]",
        "signal": "B:TERM@60",
        "submit_args": "--nice=5 --licenses='a b'",
    }
    request = dryrun(runner, app(), **options)
    first, second = " ".join(request.commands[0]).split(" : ")
    for name in (
        "partition",
        "account",
        "qos",
        "time",
        "constraint",
        "reservation",
        "mail-user",
        "mail-type",
        "signal",
    ):
        assert f"--{name}={options[name]}" in first
        assert f"--{name}={options[name]}" in second
    assert "--comment=it's mine" in first
    assert "--exclusive" in first and "--exclude=n7,n[1-3]" in first
    for words in ("--cpus-per-task=3", "--mem=2048", "--gres=gpu:2", "--job-name=my-app", "--no-requeue"):
        assert words in first.split()
    assert first.count("--nice=5 --licenses=a b") == second.count("--nice=5 --licenses=a b") == 1
    assert "--gres" not in second
    assert dryrun(runner, app(), gres="gpu:a100:4").commands[0].count("--gres=gpu:a100:4") == 1
    assert "--mem" not in " ".join(dryrun(runner, app(), nomem=True).commands[0])


def test_a_refusal_of_memory_names_the_option(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: Memory specification can not be satisfied' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BackendError, match="can not be satisfied.* -cfg nomem=True"):
        runner.run(app(), "monarch_slurm")


def test_groups_share_an_allocation_that_goes_on_without_a_lost_node(runner: Runner) -> None:
    groups = ft("train.py", j="3x2", group_hosts=2, cpu=3, gpu=2, memMB=2048)
    request = dryrun(runner, groups)
    (command,) = request.commands
    for word in ("--nodes=6", "--no-kill", "--cpus-per-task=3", "--mem=2048", "--gres=gpu:2"):
        assert command.count(word) == 1
    assert ":" not in command
    assert [role.srun["relative"] for role in request.roles] == ["0", "2", "4", "0"]
    assert [("overlap" in role.srun, role.srun["gres"]) for role in request.roles] == [(False, "gpu:2")] * 3 + [
        (True, "none")
    ]
    assert not any("--het-group" in word for index in range(4) for word in request.step(index))
    groups.roles[1].resource = Resource(cpu=4, gpu=2, memMB=2048)
    with pytest.raises(UserError, match="the group 'group1' asks for other resources than the first"):
        dryrun(runner, groups)


@pytest.mark.parametrize("spares", [0, 1])
def test_roles_that_can_lose_nodes_share_an_allocation(runner: Runner, spares: int) -> None:
    both = app(min_replicas=None if spares else 1)
    both.roles[1] = replace(both.roles[0], name="reader")
    spared = dryrun(runner, both, spares=spares)
    ((command,), (_, reader)) = spared.commands, spared.roles
    assert f"--nodes={4 + 2 * spares}" in command and "--no-kill" in command and ":" not in command
    assert reader.srun["relative"] == f"{2 + spares}" and "--het-group" not in str(spared.step(1))
    both.roles[1].resource = Resource(cpu=4, gpu=2, memMB=2048)
    assert ":" in dryrun(runner, both, spares=spares).commands[0]


def test_requeue_follows_max_retries_unless_it_is_said(runner: Runner) -> None:
    assert not dryrun(runner, app()).requeue
    assert dryrun(runner, app(max_retries=1)).requeue
    assert not dryrun(runner, app(max_retries=1), requeue=False).requeue
    assert "--requeue" in dryrun(runner, app(), requeue=True).commands[0]


def test_dry_run_shows_what_runs_and_no_secret(runner: Runner) -> None:
    request = dryrun(runner, app(env={"A": "x y"}))
    shown = SlurmBackend().show(request)
    assert "torchx_monarch.host" in shown
    assert "export A='x y'" in shown
    assert "tls:@MONARCH_REPLICA0_0:" in shown
    assert "MONARCH_CREDENTIALS" not in shown
    hosts, _ = credentials.create()
    filled = request.with_credentials(hosts.to_text())
    assert [role.env.get("MONARCH_CREDENTIALS") for role in filled.roles] == [hosts.to_text(), None]
    assert "MONARCH_CREDENTIALS" not in request.roles[0].env
    # Neither the command line nor the script, which Slurm keeps, hold what is for the hosts alone.
    for public in (shlex.join(filled.commands[0]), filled.script, shown):
        assert hosts.to_text() not in public
        assert "x y" not in public or public == shown
    assert codec.decode(SlurmRequest, json.loads(json.dumps(asdict(filled)))) == filled


def test_the_folder_of_jobs_is_no_link(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    backend = SlurmBackend()
    Path(backend.root).parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    Path(backend.root).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateDirError, match="jobs: is a symbolic link"):
        runner.run(app(), "monarch_slurm")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.usefixtures("plain_signals")
def test_ctrl_c_while_sbatch_answers_leaves_nothing(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {"sbatch": "kill -INT $PPID; sleep 0.5; echo 7", "scancel": f"echo $@ >{tmp_path}/cancelled"}
    for name in ("sbatch", "scancel", "scontrol", "squeue", "sacct", "sinfo"):
        (tools / name).write_text(f"#!/bin/sh\n{scripts.get(name, '')}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(KeyboardInterrupt):
        runner.run(app(), "monarch_slurm", cfg={"job_dir": str(tmp_path / "jobs")})
    assert (tmp_path / "cancelled").read_text() == "7\n"
    assert SlurmBackend().folders() == {} and list((tmp_path / "jobs").iterdir()) == []


def test_submitting_within_a_job_does_not_inherit_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_CONF": "/c", "MONARCH_CREDENTIALS": "x", "HOME": "/h"}
    monkeypatch.setattr(os, "environ", inside)
    assert SlurmBackend().environ() == {"SLURM_CONF": "/c", "HOME": "/h"}
    outside = {"SLURM_TIME_FORMAT": "relative", "HOME": "/h"}
    monkeypatch.setattr(os, "environ", {**outside, "SBATCH_ARRAY_INX": "0-9"})
    assert SlurmBackend().environ() == outside


def test_answers_of_squeue_and_sacct_are_read_and_each_job_is_there_once() -> None:
    text = (
        "17|PENDING|Resources\n15+0|RUNNING|None\n15+1|RUNNING|None\n"
        "8_[3-5%2]|PENDING|None\n8_2|RUNNING|None\n3|CANCELLED by 0\n7+0|FAILED\n7+1|COMPLETED\n"
    )
    jobs = parse_jobs(text)
    assert jobs == {
        "17": QueuedJob(State.PENDING, "PENDING: waits for Resources"),
        "15": QueuedJob(State.RUNNING),
        "3": QueuedJob(State.CANCELLED, "Slurm reports CANCELLED by 0"),
        "7": QueuedJob(State.FAILED),
    }


# -- the state of a job ------------------------------------------------------------------------------------------------

RUNS = SupervisorRecord("7", "app", 1.0, State.RUNNING, started=1.0)
OVER = replace(RUNS, state=State.FAILED, msg="replica r/0 exited with code 3", ended=2.0)


@pytest.fixture
def job() -> JobFolder:
    """The folder of the job 7, an app of one replica, which has not recorded anything."""
    backend = SlurmBackend()
    submitted = SubmittedApp(AppDef("app", [Role("r", image="", entrypoint="true")]), [RoleSpec("r")])
    folder = JobFolder(backend.new_folder("a b/c", backend.root))
    assert "/a-b-c-" in folder.root
    os.makedirs(folder.root)
    os.makedirs(backend._index)
    state_files.write_json(folder.app, {"created": 1.0, "jobs": ["7"], "grace": 5.0, **submitted.to_json()})
    os.symlink(folder.root, os.path.join(backend._index, "7"))
    return folder


def copy_of(folder: JobFolder, number: str) -> str:
    """Return the folder of another job like this one."""
    root = shutil.copytree(folder.root, f"{folder.root}{number}")
    content = json.loads(Path(folder.app).read_text())
    state_files.write_json(JobFolder(root).app, {**content, "jobs": [number]})
    return root


def write(folder: JobFolder, state: State, code: int | None = None, message: str = "") -> None:
    """Write the record of the replica."""
    record = SupervisorRecord("7", "app", 1.0, state=state, msg=message, started=1.0, hostname="n1")
    record.roles = [RoleRecord("r", [ReplicaRecord(0, state, exit_code=code, started=1.0)])]
    paths = folder.replica("r", 0)
    os.makedirs(paths.root, exist_ok=True)
    state_files.write_json(paths.status, asdict(record))


@pytest.mark.parametrize(
    ("said", "reason", "record", "cancelled", "state", "words"),
    [
        ("PENDING", "Resources", None, False, "PENDING", "waits for Resources"),
        ("PENDING", "DependencyNeverSatisfied", None, False, "FAILED", "can never start: DependencyNeverSatisfied"),
        ("CONFIGURING", "None", None, False, "PENDING", ""),
        ("SUSPENDED", "None", None, False, "PENDING", "Slurm reports SUSPENDED"),
        ("RUNNING", "None", RUNS, False, "RUNNING", ""),
        ("COMPLETING", "None", RUNS, False, "RUNNING", ""),
        ("COMPLETING", "None", OVER, False, "FAILED", "exited with code 3"),
        ("COMPLETING", "None", replace(OVER, outside=True), False, "RUNNING", ""),  # Slurm may queue it again
        ("PENDING", "BeginTime", replace(OVER, outside=True), False, "PENDING", "waits for BeginTime"),
        ("FAILED", "None", OVER, False, "FAILED", "exited with code 3"),
        ("FAILED", "None", None, False, "FAILED", "do all nodes see that folder"),
        ("CANCELLED by 0", "None", None, False, "CANCELLED", "Slurm reports CANCELLED by 0"),
        ("CANCELLED by 0", "None", None, True, "CANCELLED", "cancelled"),
        ("TIMEOUT", "None", replace(OVER, outside=True), False, "FAILED", "Slurm reports TIMEOUT"),
        ("NODE_FAIL", "None", RUNS, False, "FAILED", "Slurm reports NODE_FAIL"),
        ("PREEMPTED", "None", None, False, "FAILED", "Slurm reports PREEMPTED"),
        ("", "", replace(OVER, state=State.SUCCEEDED, msg=""), False, "SUCCEEDED", ""),
        ("", "", None, True, "CANCELLED", "cancelled"),
        ("", "", None, False, "FAILED", "killed by the batch system, or its node was lost"),
        ("", "", replace(OVER, outside=True), False, "FAILED", "exited with code 3"),
    ],
)
def test_state_of_a_job(
    job: JobFolder,
    said: str,
    reason: str,
    record: SupervisorRecord | None,
    cancelled: bool,
    state: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlurmBackend, "queued", lambda _: parse_jobs(f"7|{said}|{reason}" if said else ""))
    monkeypatch.setenv("PATH", "")  # no sacct
    write(job, State.RUNNING)
    if record is not None:
        state_files.write_json(job.status, asdict(record))
    if cancelled:
        job.write_stop(Outcome(State.CANCELLED, "cancelled"), None)
    before = tree(state_files.state_dir())
    app = SlurmBackend().snapshot("7")
    assert app is not None
    found = reduce(app)
    assert tree(state_files.state_dir()) == before
    assert found.state is State[state]
    assert words in found.message
    assert words or not found.message


def test_the_job_of_a_submitter_that_was_killed_is_known_by_its_folder(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads(Path(job.app).read_text())
    state_files.write_json(job.app, {**content, "jobs": []})
    Path(SlurmBackend()._index, "7").rename(Path(SlurmBackend()._index, job.app_id))
    monkeypatch.setattr(
        SlurmBackend, "queued", lambda _: parse_jobs(f"6|RUNNING|None|/x\n7|PENDING|Priority|{job.root}")
    )
    (found,) = SlurmBackend().snapshots({})
    assert (found.app_id, found.jobs) == (job.app_id, ["7"])
    assert "waits for Priority" in reduce(found).message
    cancelled: list[Sequence[str]] = []
    monkeypatch.setattr(SlurmBackend, "cancel", lambda _, jobs: cancelled.append(jobs))
    SlurmBackend().stop(found, Outcome(State.CANCELLED), None)
    assert cancelled == [["7"]]


@pytest.fixture
def squeue(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[float]]:
    """What squeue answers, which is to be filled in, and when it was asked, on a clock that is there, too."""
    said, asked, now = [""], list[float](), [0.0]

    def queued(_: SlurmBackend) -> dict[str, QueuedJob]:
        asked.append(time.monotonic())
        return parse_jobs(said[0])

    monkeypatch.setattr(SlurmBackend, "queued", queued)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    return said, asked


def test_those_that_wait_for_jobs_ask_slurm_together_and_less_often_while_nothing_changes(
    job: JobFolder, squeue: tuple[list[str], list[float]]
) -> None:
    said, asked = squeue
    ids = [str(number) for number in range(7, 12)]
    for number in ids[1:]:
        os.symlink(copy_of(job, number), os.path.join(SlurmBackend()._index, number))
    said[0] = "\n".join(f"{number}|RUNNING|None" for number in ids)
    apps = Apps(SlurmBackend(), "monarch_slurm")
    others = Apps(SlurmBackend(), "monarch_slurm")  # of another Runner

    def wait(seconds: float) -> list[bool]:
        asked.clear()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ended = [*(apps.wait(number, 0.0) for number in ids[:3]), *(others.wait(number, 0.0) for number in ids[3:])]
            time.sleep(0.5)
        return ended

    wait(400)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps == [*[0] * (len(ids) - 1), 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    said[0] = said[0].replace("8|RUNNING", "8|NODE_FAIL")
    assert wait(65) == [False, True, False, False, False]
    write(job, State.RUNNING)  # which the answer of Slurm is older than
    asked.clear()
    found = apps.read("7")
    assert found is not None and len(asked) == 1
    state_files.write_json(job.status, asdict(OVER))
    assert apps.wait("7", 0.0) and len(asked) == 1


@pytest.mark.parametrize("recorded", [True, False])
def test_folders_of_jobs_that_ended_long_ago_are_removed(
    recorded: bool, job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SlurmBackend()
    monkeypatch.setattr(SlurmBackend, "queued", lambda _: parse_jobs("7|RUNNING"))
    os.utime(job.root, (time.time() - 15 * 86400,) * 2)
    backend.prune()
    assert set(backend.folders()) == {"7"}
    if recorded:
        state_files.write_json(job.status, asdict(OVER))
        monkeypatch.setattr(SlurmBackend, "queued", lambda _: {})
    else:  # it was killed
        monkeypatch.setattr(SlurmBackend, "queued", lambda _: parse_jobs("7|TIMEOUT"))
    os.utime(job.root)
    backend.prune()
    assert set(backend.folders()) == {"7"}  # written to just now
    os.utime(job.root, (time.time() - 15 * 86400,) * 2)
    backend.prune()
    assert backend.folders() == {} and not os.path.exists(job.root)


# -- the batch step ----------------------------------------------------------------------------------------------------


@pytest.fixture
def batch_step(job: JobFolder, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> BatchStep:
    """The batch step of the app of the job 7, whose steps have ended."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    role = Role("r", image="", entrypoint="true", max_retries=1)
    return BatchStep(job, dryrun(runner, AppDef("app", [role])))


def test_steps_that_end_as_slurm_queues_the_job_again_do_not_end_the_job(
    batch_step: BatchStep, job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"squeue": "COMPLETING"}  # it must not run scontrol
    monkeypatch.setattr("torchx_monarch.backends.slurm.batch_step._run", lambda *words: answers[words[0]])
    write(job, State.FAILED, 3, "replica r/0 exited with code 3")
    assert batch_step._conclude() == 3
    record = job.load_record()
    assert record is not None and (record.state, record.outside) == (State.FAILED, True)
    (event,) = map(json.loads, Path(job.events).read_text().splitlines())
    assert event["kind"] == "stop"


def test_a_job_whose_tasks_alone_got_sigterm_goes_back_into_the_queue(
    batch_step: BatchStep, job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do in the GraceTime of a preemption."""
    run = Mock(return_value="RUNNING")
    monkeypatch.setattr("torchx_monarch.backends.slurm.batch_step._run", run)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    write(job, State.CANCELLED, 143, "the supervisor received SIGTERM, as when a machine shuts down")
    batch_step._end_rest()
    batch_step._conclude()
    run.assert_called_with("scontrol", "requeue", "7")


def test_a_job_that_is_queued_again_after_a_failure_runs(
    batch_step: BatchStep, job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _ = os.pipe()
    monkeypatch.setattr("torchx_monarch.system.processes.watch_signals", lambda _: reader)
    monkeypatch.setattr(BatchStep, "_start", lambda _: write(job, State.SUCCEEDED, 0))
    monkeypatch.setattr("torchx_monarch.backends.slurm.batch_step._run", lambda *_: None)
    write(job, State.FAILED, 3, "replica r/0 exited with code 3")
    batch_step._conclude()
    job.write_stop(Outcome(State.FAILED, "replica r/0 exited with code 3"), None)  # a sibling ran on
    assert BatchStep(job, batch_step._request).run() == 0
    assert job.load_ending() is None


@pytest.mark.parametrize("more", [{}, {"min_groups": 0, "replicas": 2, "min_replicas": 1}])
def test_a_group_or_an_elastic_role_whose_node_was_lost_has_failed_though_the_job_runs(
    more: dict[str, int], runner: Runner, job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    request = dryrun(runner, ft("train.py", j="2x2"))
    request.roles[1].spec = replace(request.roles[1].spec, name="r", **more)  # type: ignore[arg-type]
    step = BatchStep(job, request)
    write(job, State.RUNNING)
    srun = os.posix_spawnp("true", ["true"], os.environ)
    os.waitid(os.P_PID, srun, os.WEXITED | os.WNOWAIT)
    step._steps = {srun: 1}
    step._reap()
    record = job.replica("r", 0).load_record()
    assert record is not None and record.state is State.FAILED and "its node was lost" in record.msg


def test_a_removed_folder_and_a_full_disk_do_not_end_the_batch_step(batch_step: BatchStep, job: JobFolder) -> None:
    os.rename(job.root, f"{job.root}.removed")
    assert batch_step._finish(State.SUCCEEDED, "", 0) == 0
    code = "from torchx_monarch.backends.slurm.batch_step import _say; _say('lost')"
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, timeout=60, check=False).returncode == 0


def request(image: object, *mounts: object, entrypoint: str = "torchrun", **cfg: Any) -> SlurmRequest:
    role = Role("trainer", str(image), entrypoint=entrypoint, args=["train.py"], mounts=list(mounts))
    with Runner("torchx", {"monarch_slurm": monarch_slurm}) as runner:
        found: SlurmRequest = runner.dryrun(AppDef("app", [role]), "monarch_slurm", cfg=cfg).request
    return found


def test_a_step_runs_the_task_with_the_images_python() -> None:
    found = request("me/image", container="pyxis")
    start = ["python", "-I", "-m", "torchx_monarch.backends.entrypoint", "batch.task"]
    assert found.step(0)[-8:] == [*start, found.folder, "0", "SLURM_PROCID-0"]
    assert found.roles[0].command[:3] == ["python", "-m", "torchx_monarch.host"]
    assert "--container-image=me/image" in SlurmBackend().show(found)
    # The batch step runs on the node, with the submitter's interpreter, and reads the request.
    assert shlex.join([sys.executable, "-I", "-S"]) in found.script
    assert codec.decode(SlurmRequest, asdict(found)) == found


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("me/image:1", "me/image:1"),
        ("ghcr.io/me/image:1", "ghcr.io#me/image:1"),
        ("localhost/image", "localhost#image"),
        ("host:5000/a/b", "host:5000#a/b"),
        ("nvcr.io#nvidia/pytorch:24.01", "nvcr.io#nvidia/pytorch:24.01"),
        ("dockerd://me/image", "dockerd://me/image"),
    ],
)
def test_pyxis_gets_enroots_names(image: str, name: str) -> None:
    assert f"--container-image={name}" in request(image, container="pyxis").step(0)


def test_pyxis_gets_mounts_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mounts = (BindMount("/a", "/b/c/d", read_only=True), DeviceMount("/dev/x", "/dev/y"))
    found = request("me/image", *mounts, container="pyxis")
    (told,) = [word for word in found.step(0) if word.startswith("--container-mounts=")]
    binds = told.partition("=")[2].split(",")
    assert {f"{tmp_path}:{tmp_path}", f"{found.folder}:{found.folder}", "/a:/b/c/d:ro", "/dev/x:/dev/y"} == set(binds)
    assert f"--container-workdir={tmp_path}" in found.step(0)


def test_a_copied_workspace_is_the_folder_and_not_the_image(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    role = Role("trainer", "me/image", entrypoint="torchrun", args=["train.py"])
    cfg = {"container": "pyxis", "job_dir": str(tmp_path / "job")}
    with Runner("torchx", {"monarch_slurm": monarch_slurm}) as runner:
        app = AppDef("app", [role])
        found = runner.dryrun(app, "monarch_slurm", cfg=cfg, workspace=str(tmp_path / "ws")).request
    assert found.roles[0].cwd == str(tmp_path / "job")
    assert found.roles[0].image == "me/image"


def test_folders_are_mounted_before_what_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (BindMount("/a", "/a/b/c/d"), BindMount("/b", "/a/"), BindMount("/c", "/z/y/x"))
    monkeypatch.chdir("/")
    found = request("me/image", *mounts, container="pyxis", job_dir="/y")
    binds = f"/b:/a/,{found.folder}:{found.folder},/c:/z/y/x,/a:/a/b/c/d"
    assert found.roles[0].srun["container-mounts"] == binds


@pytest.mark.parametrize(
    ("image", "mount", "reason"),
    [
        ("", None, "needs an image that has torchx-monarch, and it names none"),
        ("ghcr.io/pytorch/torchx:0.9", None, "TorchX's default image"),
        ("/nonexistent/x.sqsh", None, "there is no image /nonexistent/x.sqsh"),
        ("me/image", VolumeMount("v", "/c"), "another kind than bind and device"),
    ],
)
def test_what_no_container_can_be_made_of_is_refused(image: str, mount: object, reason: str) -> None:
    with pytest.raises(ComponentValidationException, match=reason):
        request(image, *([mount] if mount else []), container="pyxis")


def test_an_image_that_is_not_used_without_containers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchx_monarch"):
        assert request(tmp_path).roles[0].cwd == str(tmp_path)
        assert request("me/image").roles[0].image_name == ""
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("torchx_monarch")]
    assert texts == ["role 'trainer': the image me/image is not used: -cfg container=pyxis runs containers"]


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", ""),
        ("job 7 runs on n1\nsrun: error: n1: task 0: Exited with exit code 1\n", ""),
        (
            "0: /bin/sh: not found\nsrun: error: n1: task 0: Exited with exit code 1\n",
            "/bin/sh: not found",
        ),
        (
            "0: slurmstepd-n1: error: pyxis: no such image\n0: slurmstepd-n1: error: spank: x failed\n",
            "pyxis: no such image",
        ),
        (
            "0: slurmstepd-n1: error: pyxis: no such image\n"
            "slurmstepd-n1: error: write to unblock task 0 failed: Broken pipe\n",
            "pyxis: no such image",
        ),
        (
            "srun: unrecognized option '--container-image=x'\nTry \"srun --help\" for more information\nrole r ended\n",
            "srun: unrecognized option '--container-image=x'",
        ),
        ("srun: error: Unable to create step for job 7\nrole r ended with code 1\n", "Unable to create step for job 7"),
    ],
)
def test_the_error_before_all_that_follows_from_it(log: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(log)
    assert last_error(str(tmp_path / "job.log")) == error
    os.mkfifo(tmp_path / "fifo")
    assert last_error(str(tmp_path / "fifo")) == ""
